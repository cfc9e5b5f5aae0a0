from h import *
import transformers as T
base=dict(vocab_size=64,hidden_size=32,intermediate_size=48,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,max_position_embeddings=64,pad_token_id=0,bos_token_id=1,eos_token_id=2)
F={}
def add(n,**k): F[n]=k
for n in "Llama Gemma Gemma2 Mistral Qwen2 Qwen3 Phi3 Olmo2 Granite Cohere Starcoder2 StableLm GptOss Olmo Qwen3Moe Mixtral Glm Glm4 Helium Nemotron SmolLM3 Ernie4_5 Arcee Seed_Oss HunYuanDenseV1 Exaone4 Cohere2 Apertus".split(): add(n)
F['Gemma']['head_dim']=8;F['Gemma2']['head_dim']=8;F['Qwen3']['head_dim']=8;F['GptOss']['head_dim']=8;F['Glm']['head_dim']=8;F['Glm4']['head_dim']=8;F['Qwen3Moe']['head_dim']=8;F['Helium']['head_dim']=8
F['GptOss'].update(num_local_experts=2,num_experts_per_tok=1);F['Qwen3Moe'].update(num_experts=4,num_experts_per_tok=2,moe_intermediate_size=16);F['Mixtral'].update(num_local_experts=2)
special={}
special['GPT2']=lambda: T.GPT2LMHeadModel(T.GPT2Config(vocab_size=64,n_embd=32,n_layer=3,n_head=4,n_positions=64))
special['GPTNeoX']=lambda: T.GPTNeoXForCausalLM(T.GPTNeoXConfig(vocab_size=64,hidden_size=32,intermediate_size=48,num_hidden_layers=3,num_attention_heads=4,max_position_embeddings=64))
special['Bloom']=lambda: T.BloomForCausalLM(T.BloomConfig(vocab_size=64,hidden_size=32,n_layer=3,n_head=4))
special['Falcon']=lambda: T.FalconForCausalLM(T.FalconConfig(vocab_size=64,hidden_size=32,num_hidden_layers=3,num_attention_heads=4,multi_query=True))
special['FalconNew']=lambda: T.FalconForCausalLM(T.FalconConfig(vocab_size=64,hidden_size=32,num_hidden_layers=3,num_attention_heads=4,new_decoder_architecture=True,num_kv_heads=2))
special['GPTJ']=lambda: T.GPTJForCausalLM(T.GPTJConfig(vocab_size=64,n_embd=32,n_layer=3,n_head=4,rotary_dim=4,n_positions=64))
special['GPTNeo']=lambda: T.GPTNeoForCausalLM(T.GPTNeoConfig(vocab_size=64,hidden_size=32,num_layers=3,num_heads=4,attention_types=[[["global","local","global"],1]],window_size=4,max_position_embeddings=64))
special['OPT']=lambda: T.OPTForCausalLM(T.OPTConfig(vocab_size=64,hidden_size=32,num_hidden_layers=3,num_attention_heads=4,ffn_dim=48,max_position_embeddings=64,word_embed_proj_dim=32))
special['GPTBigCode']=lambda: T.GPTBigCodeForCausalLM(T.GPTBigCodeConfig(vocab_size=64,n_embd=32,n_layer=3,n_head=4,n_positions=64))
special['CodeGen']=lambda: T.CodeGenForCausalLM(T.CodeGenConfig(vocab_size=64,n_embd=32,n_layer=3,n_head=4,rotary_dim=4,n_positions=64,n_ctx=64))
special['MPT']=lambda: T.MptForCausalLM(T.MptConfig(vocab_size=64,d_model=32,n_layers=3,n_heads=4,max_seq_len=64))
special['DeepseekV3']=lambda: T.DeepseekV3ForCausalLM(T.DeepseekV3Config(**{**base,'num_key_value_heads':4},kv_lora_rank=8,q_lora_rank=8,qk_rope_head_dim=4,qk_nope_head_dim=8,v_head_dim=8,n_routed_experts=4,num_experts_per_tok=2,n_group=1,topk_group=1,moe_intermediate_size=16,first_k_dense_replace=1))
special['DeepseekV2']=lambda: T.DeepseekV2ForCausalLM(T.DeepseekV2Config(**{**base,'num_key_value_heads':4},kv_lora_rank=8,q_lora_rank=8,qk_rope_head_dim=4,qk_nope_head_dim=8,v_head_dim=8,n_routed_experts=4,num_experts_per_tok=2,n_group=1,topk_group=1,moe_intermediate_size=16,first_k_dense_replace=1))
special['Gemma3']=lambda: T.Gemma3ForCausalLM(T.Gemma3TextConfig(**base,head_dim=8,sliding_window=4,layer_types=['sliding_attention','full_attention','sliding_attention']))
special['Gemma3n']=lambda: T.Gemma3nForCausalLM(T.Gemma3nTextConfig(**{**base,'num_hidden_layers':4,'intermediate_size':48},head_dim=8,sliding_window=4,vocab_size_per_layer_input=64,hidden_size_per_layer_input=8,laurel_rank=4,num_kv_shared_layers=2,layer_types=['sliding_attention','full_attention']*2,activation_sparsity_pattern=[0.]*4))
special['Llama4']=lambda: T.Llama4ForCausalLM(T.Llama4TextConfig(**base,head_dim=8,intermediate_size_mlp=48,num_local_experts=2,attention_chunk_size=5,no_rope_layers=[1,1,0]))
special['Doge']=lambda: T.DogeForCausalLM(T.DogeConfig(**base))
special['Qwen3Next']=lambda: T.Qwen3NextForCausalLM(T.Qwen3NextConfig(**base,head_dim=8,num_experts=2,num_experts_per_tok=1,moe_intermediate_size=16,shared_expert_intermediate_size=16,layer_types=['full_attention','linear_attention','full_attention'],linear_num_value_heads=2,linear_num_key_heads=2,linear_key_head_dim=8,linear_value_head_dim=8))
special['Zamba2']=None
def make(n):
    if n in special: return special[n]()
    cn={'Seed_Oss':'SeedOss'}.get(n,n)
    return getattr(T,cn+'ForCausalLM')(getattr(T,cn+'Config')(**{**base,**F[n]}))
names=('o_proj','c_proj','dense','out_proj')
def attns(m):
    r=[]
    for n,x in m.named_modules():
        for c,y in x.named_children():
            if (c in names) and any(s in n.split('.')[-1] for s in('attn','attention')) and 'linear_attn' not in n: r.append((x,y))
    return r
sel=sys.argv[1].split(',') if len(sys.argv)>1 else [n for n in list(F)+list(special)]
for n in sel:
    if n in special and special[n] is None: continue
    torch.manual_seed(1)
    try: m=make(n).float().eval()
    except BaseException as e: print(n,'| cannot build',type(e).__name__,str(e)[:100]); continue
    for p in m.parameters():
        if p.dim()>1: torch.nn.init.normal_(p,std=0.2)
    ids=torch.randint(3,64,(2,11)); am=torch.ones_like(ids); am[0,:3]=0
    A=attns(m); 
    H=4
    try: b=out(m,ids,attention_mask=am)
    except BaseException as e: print(n,'| cannot run',type(e).__name__,str(e)[:100]); continue
    valid=am.bool()
    L=len(A)-1
    at,o=A[L]; w=o.weight.shape[0] if type(o).__name__=='Conv1D' else o.weight.shape[1]; d=w//H
    # head+query
    def t1():
        with zero(o,slice(2*d,3*d)): want=out(m,ids,attention_mask=am)
        with regard.knock_out(m,heads=[(L,2)]): got=out(m,ids,attention_mask=am)
        return got[valid],want[valid],b[valid]
    report(f"{n} f32 sdpa knock head padded",t1,2e-5)
    a0,o0=A[0]
    def t2():
        with zero(o0,slice(1*d,2*d)), zero(o,slice(0,d)): want=out(m,ids,attention_mask=am)
        with regard.knock_out(m,heads=[(L,0)]), regard.knock_out(m,heads=[(0,1)]): got=out(m,ids,attention_mask=am)
        return got[valid],want[valid],b[valid]
    report(f"{n} f32 nested two layers",t2,2e-5)
    # keys in eager: key 2 of real tokens hidden from queries 4: in head 3 of layer0
    def t3():
        try: m.set_attn_implementation('eager')
        except Exception: pass
        b=out(m,ids,attention_mask=am)
        def f(mod,a,kw):
            am4=kw.get('attention_mask'); 
            am4=am4.expand(-1,H,-1,-1).clone()
            v=False if am4.dtype==torch.bool else torch.finfo(am4.dtype).min
            am4[0,3,3+4:,3+2]=v; am4[1,3,4:,2]=v
            kw['attention_mask']=am4; return a,kw
        h=a0.register_forward_pre_hook(f,with_kwargs=True)
        try: want=out(m,ids,attention_mask=am)
        finally: h.remove()
        with regard.knock_out(m,heads=[(0,3)],keys=[2],queries=slice(4,None)): got=out(m,ids,attention_mask=am)
        return got[valid],want[valid],b[valid]
    report(f"{n} f32 eager keys/queries padded",t3,2e-5)
    # patch parts pattern: oracle none -> self-check via z patch from other sequence
    def t4():
        src=torch.randint(3,64,(1,11)); one=ids[1:]
        zs={}
        h=o.register_forward_pre_hook(lambda mod,a:zs.update(z=a[0].clone()))
        out(m,src); h.remove()
        def f(mod,a):
            x=a[0].clone(); x[:,[3,10],2*d:3*d]=zs['z'].reshape(1,11,-1)[:,[3,10],2*d:3*d].reshape(x[:,[3,10],2*d:3*d].shape); return (x,)+a[1:]
        base_=out(m,one)
        h=o.register_forward_pre_hook(f); want=out(m,one); h.remove()
        with regard.watch(m,keep='qkv') as s, torch.no_grad(): m(src)
        with regard.patch_heads(m,s,[(L,2)],queries=[3,-1]): got=out(m,one)
        return got,want,base_
    report(f"{n} f32 patch z queries",t4,1e-4)
