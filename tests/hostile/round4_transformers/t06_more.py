from h import *; from o import both,logged,compare
from transformers import *
import transformers as tf
def tok(*s,seed=1,hi=97):
    g=torch.Generator().manual_seed(seed); return torch.randint(3,hi,s,generator=g)
def rnd(*s,seed=1):
    return torch.randn(*s,generator=torch.Generator().manual_seed(seed))
AC=lambda t,**k: AutoConfig.for_model(t,**k)
M={}
def model(name,cfg,cls,acts,impls=("eager","sdpa")): M[name]=(cfg,cls,acts,impls)
x=tok(2,8); am=torch.ones_like(x); am[0,5:]=0; dx=tok(2,5,seed=2)
enc=dict(vocab_size=97,hidden_size=32,intermediate_size=40,num_hidden_layers=2,num_attention_heads=4,max_position_embeddings=64,pad_token_id=0)
E={'plain':lambda m:m(x)[0],'right pad':lambda m:m(x,attention_mask=am)[0],'left pad':lambda m:m(x,attention_mask=am.flip(1))[0],'hole':lambda m:m(x,attention_mask=torch.tensor([[1,1,0,1,1,0,1,1]]*2))[0],
   'token types':lambda m:m(x,attention_mask=am,token_type_ids=(x>40).long())[0]}
E2={k:v for k,v in E.items() if k!='token types'}
for t in ('bert','roberta','electra','xlm-roberta','camembert','data2vec-text','ernie','roformer','rembert','layoutlm'):
    model(t,lambda t=t:AC(t,**enc,**({'embedding_size':32} if t in('electra',) else {})),AutoModel,E)
model('distilbert',lambda:AC('distilbert',vocab_size=97,dim=32,hidden_dim=40,n_layers=2,n_heads=4,max_position_embeddings=64,pad_token_id=0),AutoModel,E2)
model('albert',lambda:AC('albert',**{**enc,'hidden_size':32},embedding_size=16,num_hidden_groups=1),AutoModel,E)
model('mpnet',lambda:AC('mpnet',**enc),AutoModel,E2)
model('deberta',lambda:AC('deberta',**enc,relative_attention=True,pos_att_type=['c2p','p2c'],max_relative_positions=16),AutoModel,E)
model('deberta-v2',lambda:AC('deberta-v2',**enc,relative_attention=True,pos_att_type=['c2p','p2c'],max_relative_positions=16,position_buckets=4,share_att_key=True),AutoModel,E)
model('modernbert',lambda:AC('modernbert',**{**enc},global_attn_every_n_layers=2,local_attention=4,bos_token_id=1,eos_token_id=2,cls_token_id=1,sep_token_id=2),AutoModel,E2)
model('funnel',lambda:AC('funnel',vocab_size=97,block_sizes=[1,1],d_model=32,n_head=4,d_head=8,d_inner=40),AutoModel,E2)
model('squeezebert',lambda:AC('squeezebert',**enc,embedding_size=32),AutoModel,E)
model('nomic',lambda:AC('esm',**enc,mask_token_id=96,position_embedding_type='rotary'),AutoModel,E2)
model('bigbird full',lambda:AC('big_bird',**enc,attention_type='original_full'),AutoModel,E)
model('longformer',lambda:AC('longformer',**enc,attention_window=[4,4]),AutoModel,E2)
model('xlnet',lambda:AC('xlnet',vocab_size=97,d_model=32,n_layer=2,n_head=4,d_inner=40),AutoModel,E2)
model('t5 enc',lambda:AC('t5',vocab_size=97,d_model=32,d_kv=8,d_ff=40,num_layers=2,num_heads=4,decoder_start_token_id=0,pad_token_id=0),T5EncoderModel,E2)
# encoder-decoders
g=lambda m,**k: m.generate(x,attention_mask=am,max_new_tokens=5,min_new_tokens=5,do_sample=False,**k)
ED={'teacher':lambda m:m(input_ids=x,attention_mask=am,decoder_input_ids=dx).logits,'generate':lambda m:g(m),'beams':lambda m:g(m,num_beams=3,num_return_sequences=2),
 'encoder once, decode twice':lambda m:[ (lambda e:[m(encoder_outputs=e,attention_mask=am,decoder_input_ids=tok(2,4,seed=s)).logits for s in(3,4)])(m.get_encoder()(x,attention_mask=am))][0][1],
 'generate no cache':lambda m:g(m,use_cache=False),'decoder mask':lambda m:m(input_ids=x,attention_mask=am,decoder_input_ids=dx,decoder_attention_mask=torch.tensor([[0,1,1,1,1],[1,1,1,1,1]])).logits,
 'static':lambda m:g(m,cache_implementation='static'),'sample 2':lambda m:g(m,num_return_sequences=2) if False else m.generate(x,attention_mask=am,max_new_tokens=5,min_new_tokens=5,do_sample=True,num_return_sequences=2)}
b=dict(vocab_size=97,d_model=32,encoder_layers=2,decoder_layers=2,encoder_attention_heads=4,decoder_attention_heads=4,encoder_ffn_dim=40,decoder_ffn_dim=40,max_position_embeddings=64,pad_token_id=0,bos_token_id=1,eos_token_id=2,decoder_start_token_id=2,dropout=0.,attention_dropout=0.,forced_eos_token_id=None)
for t in ('bart','mbart','pegasus','marian','m2m_100','blenderbot'): model(t,lambda t=t:AC(t,**b),AutoModelForSeq2SeqLM,ED)
tt=dict(vocab_size=97,d_model=32,d_kv=8,d_ff=40,num_layers=2,num_heads=4,decoder_start_token_id=0,pad_token_id=0,eos_token_id=2,dropout_rate=0.,relative_attention_num_buckets=8,relative_attention_max_distance=10)
for t in ('t5','mt5','umt5'): model(t,lambda t=t:AC(t,**tt),AutoModelForSeq2SeqLM,ED)
model('t5gemma',lambda:T5GemmaConfig(encoder=dict(**{**dict(vocab_size=97,hidden_size=32,intermediate_size=40,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_dim=8,sliding_window=4,query_pre_attn_scalar=8)}),decoder=dict(vocab_size=97,hidden_size=32,intermediate_size=40,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_dim=8,sliding_window=4,query_pre_attn_scalar=8,cross_attention_hidden_size=32),vocab_size=97),AutoModelForSeq2SeqLM,{'teacher':ED['teacher'],'generate':ED['generate']},("eager",))
w=dict(vocab_size=97,d_model=32,encoder_layers=2,decoder_layers=2,encoder_attention_heads=4,decoder_attention_heads=4,encoder_ffn_dim=40,decoder_ffn_dim=40,max_source_positions=20,max_target_positions=64,num_mel_bins=8,pad_token_id=0,bos_token_id=1,eos_token_id=2,decoder_start_token_id=3,suppress_tokens=None,begin_suppress_tokens=None)
feat=rnd(2,8,40)
model('whisper',lambda:AC('whisper',**w),WhisperForConditionalGeneration,{'teacher':lambda m:m(input_features=feat.to(m.dtype),decoder_input_ids=dx).logits,'generate':lambda m:m.generate(feat.to(m.dtype),max_new_tokens=5,min_new_tokens=5,do_sample=False),'beams':lambda m:m.generate(feat.to(m.dtype),max_new_tokens=5,num_beams=2)})
# vision
img=rnd(2,3,32,32)
v=dict(hidden_size=32,intermediate_size=40,num_hidden_layers=2,num_attention_heads=4,image_size=32,patch_size=8)
V={'image':lambda m:m(pixel_values=img)[0],'two batches':lambda m:[m(pixel_values=img)[0],m(pixel_values=rnd(3,3,32,32,seed=5))[0]][1]}
for t in ('vit','deit','dinov2','beit','ijepa','vit_msn','siglip_vision_model','clip_vision_model','data2vec-vision','dinov2_with_registers','yolos'):
    model(t,lambda t=t:AC(t,**{**v,**({'image_size':[32,32]} if t=='yolos' else {})}),AutoModel,V)
model('dinov3',lambda:AC('dinov3_vit',**v),AutoModel,V)
model('vit interp',lambda:AC('vit',**v),AutoModel,{'64px':lambda m:m(pixel_values=rnd(2,3,64,48),interpolate_pos_encoding=True)[0]})
model('swin',lambda:AC('swin',image_size=32,patch_size=2,embed_dim=16,depths=[2,2],num_heads=[2,4],window_size=4),AutoModel,V)
model('swinv2',lambda:AC('swinv2',image_size=32,patch_size=2,embed_dim=16,depths=[2,2],num_heads=[2,4],window_size=4),AutoModel,V)
model('segformer',lambda:AC('segformer',num_encoder_blocks=2,depths=[1,1],sr_ratios=[2,1],hidden_sizes=[16,32],num_attention_heads=[2,4],patch_sizes=[7,3],strides=[4,2],mlp_ratios=[2,2]),AutoModel,V)
model('pvt',lambda:AC('pvt',image_size=32,num_encoder_blocks=2,depths=[1,1],sequence_reduction_ratios=[2,1],hidden_sizes=[16,32],patch_sizes=[4,2],strides=[4,2],num_attention_heads=[2,4],mlp_ratios=[2,2]),AutoModel,V)
model('mobilevit',lambda:AC('mobilevit',image_size=64,hidden_sizes=[16,24,32],neck_hidden_sizes=[8,8,8,16,16,16,16],num_attention_heads=4,patch_size=2),AutoModel,{'image':lambda m:m(pixel_values=rnd(1,3,64,64))[0]})
model('clip',lambda:CLIPConfig(text_config=dict(vocab_size=97,hidden_size=32,intermediate_size=40,num_hidden_layers=2,num_attention_heads=4,max_position_embeddings=32,eos_token_id=2),vision_config=v,projection_dim=16),AutoModel,{'both':lambda m:m(input_ids=x,attention_mask=am,pixel_values=img).logits_per_image})
model('blip2 qformer',lambda:AC('blip_2_qformer',**{k:q for k,q in enc.items()},encoder_hidden_size=32),Blip2QFormerModel,{'q':lambda m:m(query_embeds=rnd(2,4,32),encoder_hidden_states=rnd(2,7,32,seed=2))[0]})
# audio
model('wav2vec2',lambda:AC('wav2vec2',vocab_size=30,hidden_size=32,intermediate_size=40,num_hidden_layers=2,num_attention_heads=4,conv_dim=(16,16),conv_stride=(5,4),conv_kernel=(10,8),num_feat_extract_layers=2,num_conv_pos_embeddings=4,num_conv_pos_embedding_groups=2),AutoModel,{'a':lambda m:m(rnd(2,800))[0],'masked':lambda m:m(rnd(2,800),attention_mask=(torch.arange(800)[None]<torch.tensor([[400],[800]])).long())[0]})
model('ast',lambda:AC('audio-spectrogram-transformer',hidden_size=32,intermediate_size=40,num_hidden_layers=2,num_attention_heads=4,patch_size=4,max_length=16,num_mel_bins=16,frequency_stride=4,time_stride=4),AutoModel,{'a':lambda m:m(rnd(2,16,16))[0]})
# multimodal
tx=dict(model_type='llama',vocab_size=97,hidden_size=32,intermediate_size=40,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,max_position_embeddings=128,pad_token_id=0)
ids=torch.cat([tok(2,3,hi=90),torch.full((2,16),95),tok(2,4,hi=90,seed=3)],1)
LL={'forward':lambda m:m(input_ids=ids,pixel_values=img.to(m.dtype)).logits,'generate':lambda m:m.generate(input_ids=ids,pixel_values=img.to(m.dtype),attention_mask=torch.ones_like(ids),max_new_tokens=4,min_new_tokens=4,do_sample=False),'text only':lambda m:m(input_ids=ids[:,:3]).logits}
model('llava',lambda:LlavaConfig(vision_config=dict(model_type='clip_vision_model',**v),text_config=tx,image_token_index=95,vision_feature_layer=-1),LlavaForConditionalGeneration,LL)
model('paligemma',lambda:PaliGemmaConfig(vision_config=dict(model_type='siglip_vision_model',**v),text_config={**tx,'model_type':'gemma','head_dim':8},image_token_index=95,projection_dim=32),PaliGemmaForConditionalGeneration,{'forward':lambda m:m(input_ids=ids,pixel_values=img,attention_mask=torch.ones_like(ids),token_type_ids=torch.zeros_like(ids)).logits,'generate':LL['generate']})
qv=dict(depth=2,embed_dim=32,hidden_size=32,num_heads=4,patch_size=4,spatial_merge_size=2,temporal_patch_size=2,in_channels=3,mlp_ratio=2)
qids=torch.cat([tok(1,3,hi=90),torch.tensor([[93]]),torch.full((1,4),95),torch.tensor([[94]]),tok(1,4,hi=90,seed=3)],1)
def qw(m,**k): return dict(input_ids=qids,mm_token_type_ids=(qids==95).long(),attention_mask=torch.ones_like(qids),pixel_values=rnd(16,3*2*16),image_grid_thw=torch.tensor([[1,4,4]]),**k)
model('qwen2_vl',lambda:Qwen2VLConfig(text_config={**{k:q for k,q in tx.items() if k!='model_type'},'rope_parameters':{'rope_type':'default','type':'mrope','mrope_section':[1,1,2],'rope_theta':1e4}},vision_config=qv,image_token_id=95,vision_start_token_id=93,vision_end_token_id=94,video_token_id=96),Qwen2VLForConditionalGeneration,
  {'forward':lambda m:m(**qw(m)).logits,'generate':lambda m:m.generate(**qw(m),max_new_tokens=4,min_new_tokens=4,do_sample=False)})
only=sys.argv[1].split(',') if len(sys.argv)>1 else None
if __name__=="__main__":
  for n,(cfg,cls,acts,impls) in M.items():
    if only and n not in only and not (only==['REST'] and list(M).index(n)>=list(M).index('dinov3')): continue
    for impl in impls:
        try:
            m=build(cfg(),cls=cls,impl=impl)
            ref=build(cfg(),cls=cls,impl="eager"); ref.load_state_dict(m.state_dict())
        except Exception as e:
            line(f"{n} {impl}",f"SETUP: {type(e).__name__} {str(e)[:110]}"); continue
        for k,f in acts.items():
            run(f"{n} {impl} {k}",lambda:both(f"{n} {impl} {k}",m,f,ref=ref))
  done()
