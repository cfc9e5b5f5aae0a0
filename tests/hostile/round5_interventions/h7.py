from h5x import *
print('=====')
def rnd(m):
    m=m.double().eval()
    for p in m.parameters():
        if p.dim()>1: nn.init.normal_(p,std=.2)
    return m
def oth(name,mk,call,sites,H=4,tol=1e-6,key=None):
    """sites: list of out-projection module names in order of attention"""
    try: mm=rnd(mk()); b=call(mm)
    except BaseException as e: print(name,'| cannot',type(e).__name__,str(e)[:150]); return
    mods=dict(mm.named_modules()); 
    miss=[x for x in sites if x not in mods]
    if miss: print(name,'| note missing',miss,[n for n in mods if n.endswith(('out_proj','o_proj','dense','.o','Wo'))][:12]); sites=[x for x in sites if x in mods]
    with torch.no_grad(), regard.watch(mm) as s: call(mm)
    ls=list(s.layers)
    if len(ls)!=len(sites): print(name,'| note layers',ls,sites)
    for i,st in enumerate(sites):
        o=mods[st]; w=(o.weight.shape[0] if type(o).__name__=='Conv1D' else o.weight.shape[1]); d=w//H
        parent=st.rsplit('.',1)[0]
        li=[j for j,l in enumerate(ls) if l==parent or l.startswith(parent+'.') or parent.startswith(l+'.') or parent==l.split('#')[0]]
        li=li[0] if li else [j for j,l in enumerate(ls) if l.rsplit('.',1)[0]==parent.rsplit('.',1)[0]][0]
        def f():
            with zero(o,slice(2*d,3*d)): want=call(mm)
            with K(mm,heads=[(li,2)]): g=call(mm)
            return g,want,b
        report(f'{name} head {li} {st}',f,tol)
        def f():
            with K(mm,layers=[parent]): g=call(mm)
            with zero(o,slice(None)): want=call(mm)
            return g,want,b
        report(f'{name} layer name {parent}',f,tol)
        def f():
            with zero(o,slice(2*d,3*d),rows=[1]): want=call(mm)
            with K(mm,heads=[(li,2)],keys=slice(None),queries=[1]): g=call(mm)
            return g,want,b
        report(f'{name} query 1 {li}',f,tol)
        def f():
            h=o.register_forward_pre_hook(lambda mod,a:(torch.cat([a[0][...,:d]*.5,a[0][...,d:]],-1),)); want=call(mm); h.remove()
            with regard.patch_heads(mm,lambda z:z/2,[(li,0)]): g=call(mm)
            return g,want,b
        report(f'{name} half {li}',f,tol)
t=torch.randint(3,60,(2,6)); am6=torch.ones_like(t); am6[0,4:]=0; dec=torch.randint(3,60,(2,5))
oth('T5',lambda:T.T5ForConditionalGeneration(T.T5Config(vocab_size=64,d_model=32,d_kv=8,d_ff=40,num_layers=2,num_decoder_layers=2,num_heads=4)),lambda m:out(m,input_ids=t,attention_mask=am6,decoder_input_ids=dec),['encoder.block.0.layer.0.SelfAttention.o','encoder.block.1.layer.0.SelfAttention.o','decoder.block.0.layer.0.SelfAttention.o','decoder.block.0.layer.1.EncDecAttention.o','decoder.block.1.layer.0.SelfAttention.o','decoder.block.1.layer.1.EncDecAttention.o'])
oth('BART',lambda:T.BartForConditionalGeneration(T.BartConfig(vocab_size=64,d_model=32,encoder_ffn_dim=40,decoder_ffn_dim=40,encoder_layers=1,decoder_layers=2,encoder_attention_heads=4,decoder_attention_heads=4,max_position_embeddings=64,pad_token_id=0,bos_token_id=1,eos_token_id=2)),lambda m:out(m,input_ids=t,attention_mask=am6,decoder_input_ids=dec),['model.encoder.layers.0.self_attn.out_proj','model.decoder.layers.0.self_attn.out_proj','model.decoder.layers.0.encoder_attn.out_proj','model.decoder.layers.1.encoder_attn.out_proj'])
feat=torch.randn(2,8,20).double()
oth('Whisper',lambda:T.WhisperForConditionalGeneration(T.WhisperConfig(vocab_size=64,num_mel_bins=8,d_model=32,encoder_ffn_dim=40,decoder_ffn_dim=40,encoder_layers=1,decoder_layers=1,encoder_attention_heads=4,decoder_attention_heads=4,max_source_positions=10,max_target_positions=20,pad_token_id=0,bos_token_id=1,eos_token_id=2,decoder_start_token_id=1)),lambda m:out(m,input_features=feat,decoder_input_ids=dec),['model.encoder.layers.0.self_attn.out_proj','model.decoder.layers.0.self_attn.out_proj','model.decoder.layers.0.encoder_attn.out_proj'])
bc=dict(vocab_size=64,hidden_size=32,intermediate_size=40,num_hidden_layers=2,num_attention_heads=4,max_position_embeddings=64)
oth('BERT',lambda:T.BertForMaskedLM(T.BertConfig(**bc)),lambda m:out(m,t,attention_mask=am6)[am6.bool()],['bert.encoder.layer.0.attention.output.dense','bert.encoder.layer.1.attention.output.dense'])
oth('DistilBERT',lambda:T.DistilBertForMaskedLM(T.DistilBertConfig(vocab_size=64,dim=32,hidden_dim=40,n_layers=2,n_heads=4)),lambda m:out(m,t,attention_mask=am6)[am6.bool()],['distilbert.transformer.layer.0.attention.out_lin'])
oth('ALBERT shared',lambda:T.AlbertForMaskedLM(T.AlbertConfig(**{**bc,'num_hidden_layers':1},embedding_size=16)),lambda m:out(m,t,attention_mask=am6)[am6.bool()],['albert.encoder.albert_layer_groups.0.albert_layers.0.attention.dense'])
oth('DebertaV2',lambda:T.DebertaV2ForMaskedLM(T.DebertaV2Config(**bc,relative_attention=True,pos_att_type=['p2c','c2p'],type_vocab_size=0)),lambda m:out(m,t,attention_mask=am6)[am6.bool()],['deberta.encoder.layer.1.attention.output.dense'])
oth('ModernBert',lambda:T.ModernBertForMaskedLM(T.ModernBertConfig(**bc,pad_token_id=0,bos_token_id=1,eos_token_id=2,cls_token_id=1,sep_token_id=2,local_attention=4)),lambda m:out(m,t,attention_mask=am6)[am6.bool()],['model.layers.0.attn.Wo','model.layers.1.attn.Wo'])
px=torch.randn(2,3,8,8).double(); vc=dict(hidden_size=32,intermediate_size=40,num_hidden_layers=2,num_attention_heads=4,image_size=8,patch_size=4)
oth('ViT',lambda:T.ViTForImageClassification(T.ViTConfig(**vc)),lambda m:out(m,pixel_values=px),[n for n in ('vit.layers.0.attention.o_proj',)] )
oth('Dinov2',lambda:T.Dinov2Model(T.Dinov2Config(**vc)),lambda m:m(pixel_values=px).last_hidden_state.detach(),['layers.1.attention.o_proj','encoder.layer.1.attention.o_proj','layers.1.attention.out_proj','encoder.layer.1.attention.out_proj','encoder.layers.1.attention.o_proj'])
oth('CLIP',lambda:T.CLIPModel(T.CLIPConfig(text_config=dict(**bc,pad_token_id=0,bos_token_id=1,eos_token_id=2,projection_dim=16),vision_config=dict(**vc,projection_dim=16),projection_dim=16)),lambda m:m(input_ids=t,pixel_values=px,attention_mask=am6).logits_per_image.detach(),['vision_model.encoder.layers.1.self_attn.out_proj','text_model.encoder.layers.0.self_attn.out_proj','text_model.encoder.layers.1.self_attn.out_proj'])
lc=dict(**base); lc['vocab_size']=70
it=torch.cat([torch.full((2,4),66),t],1)
oth('LLaVA',lambda:T.LlavaForConditionalGeneration(T.LlavaConfig(vision_config=T.CLIPVisionConfig(**vc,projection_dim=16),text_config=T.LlamaConfig(**lc),image_token_index=66,image_token_id=66)),lambda m:out(m,input_ids=it,pixel_values=px),['model.vision_tower.encoder.layers.0.self_attn.out_proj','model.language_model.layers.0.self_attn.o_proj','model.language_model.layers.2.self_attn.o_proj'])
oth('Wav2Vec2',lambda:T.Wav2Vec2Model(T.Wav2Vec2Config(**{k:v for k,v in bc.items() if k!='max_position_embeddings'},conv_dim=(8,8),conv_kernel=(3,3),conv_stride=(2,2),num_feat_extract_layers=2,num_conv_pos_embeddings=4,num_conv_pos_embedding_groups=2)),lambda m:m(torch.sin(torch.arange(120.).double()).view(2,60)).last_hidden_state.detach(),['encoder.layers.1.attention.out_proj'])
oth('Swin',lambda:T.SwinModel(T.SwinConfig(image_size=16,patch_size=2,embed_dim=32,depths=[2],num_heads=[4],window_size=4)),lambda m:m(torch.cat([px,px],2).repeat(1,1,1,2)).last_hidden_state.detach(),['encoder.layers.0.blocks.0.attention.output.dense','encoder.layers.0.blocks.1.attention.output.dense'])
# torch modules
class TD(nn.Module):
    def __init__(s,bf=True,norm_first=False):
        super().__init__(); s.e=nn.Embedding(64,32); s.t=nn.Transformer(32,4,2,2,40,batch_first=bf,norm_first=norm_first); s.h=nn.Linear(32,64); s.bf=bf
    def forward(s,a,b):
        x,y=s.e(a),s.e(b)
        if not s.bf: x,y=x.transpose(0,1),y.transpose(0,1)
        z=s.t(x,y,tgt_mask=nn.Transformer.generate_square_subsequent_mask(b.shape[1],dtype=x.dtype)); z=z if s.bf else z.transpose(0,1); return s.h(z)
import torch
def zmha(mm,name,h):  # zero columns of out_proj weight
    o=dict(mm.named_modules())[name].out_proj
    return o
for bf in (True,False):
  for nf in (False,True):
    torch.manual_seed(2); mm=rnd(TD(bf,nf)); b=out(mm,t,dec)
    for i,nme in enumerate(['t.encoder.layers.0.self_attn','t.encoder.layers.1.self_attn','t.decoder.layers.0.self_attn','t.decoder.layers.0.multihead_attn','t.decoder.layers.1.self_attn','t.decoder.layers.1.multihead_attn']):
        def f():
            o=dict(mm.named_modules())[nme].out_proj; w0=o.weight.data.clone(); o.weight.data[:,16:24]=0; want=out(mm,t,dec); o.weight.data.copy_(w0)
            with K(mm,heads=[(i,2)]): g=out(mm,t,dec)
            return g,want,b
        report(f'nn.Transformer bf={bf} nf={nf} head {i}',f,1e-9)
        def f():
            o=dict(mm.named_modules())[nme].out_proj; w0=o.weight.data.clone(); o.weight.data[:,16:24]=0
            want=torch.cat([b[:1],out(mm,t,dec)[1:]]); o.weight.data.copy_(w0)
            with K(mm,heads=[(i,2)],keys=[None,slice(None)]): g=out(mm,t,dec)
            return g,want,b
        report(f'nn.Transformer bf={bf} nf={nf} seq 1 {i}',f,1e-9)
for kw in (dict(add_bias_kv=True),dict(add_zero_attn=True),dict(kdim=20,vdim=24),dict(bias=False)):
  for bf in (True,False):
    for nw in (True,False):
        class MM(nn.Module):
            def __init__(s): super().__init__(); s.a=nn.MultiheadAttention(32,4,batch_first=bf,**kw); s.l=nn.Linear(32,32)
            def forward(s,x,k,v): return s.l(s.a(x,k,v,need_weights=nw)[0])
        mm=rnd(MM()); x=torch.randn(2,5,32).double(); kd,vd=kw.get('kdim',32),kw.get('vdim',32); k_,v_=torch.randn(2,5,kd).double(),torch.randn(2,5,vd).double()
        def f():
            b=out(mm,x,k_,v_); o=mm.a.out_proj; w0=o.weight.data.clone(); o.weight.data[:,16:24]=0; want=out(mm,x,k_,v_); o.weight.data.copy_(w0)
            with K(mm,heads=[(0,2)]): g=out(mm,x,k_,v_)
            return g,want,b
        report(f'MHA {kw} bf={bf} nw={nw} head',f)
        def f():
            km=torch.zeros(2,5,dtype=torch.bool); km[:,2]=True; sq=2 if bf else 5; lk=5
            n=k_.shape[1] if bf else k_.shape[0]; bb=2 if bf else 5
            km=torch.zeros(bb,n,dtype=torch.bool); km[:,1]=True
            with torch.no_grad(): want=mm.l(mm.a(x,k_,v_,need_weights=nw,key_padding_mask=km)[0])
            with K(mm,layers=[0],keys=[1]): g=out(mm,x,k_,v_)
            return g,want,out(mm,x,k_,v_)
        report(f'MHA {kw} bf={bf} nw={nw} keys',f)
