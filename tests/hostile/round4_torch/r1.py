from lib import *
# minimal: GQA einsum 5D
class M(nn.Module):
    def __init__(s,B,T,H,G,D): super().__init__(); s.H,s.G,s.D=H,G,D; s.q=nn.Linear(8,H*G*D); s.k=nn.Linear(8,H*D); s.v=nn.Linear(8,H*D); s.o=nn.Linear(H*G*D,8)
    def forward(s,x):
        B,T,_=x.shape
        q=s.q(x).view(B,T,s.H,s.G,s.D); k=s.k(x).view(B,T,s.H,s.D); v=s.v(x).view(B,T,s.H,s.D)
        w=torch.einsum("bthgd,bshd->bhgts",q,k).mul(s.D**-.5).softmax(-1); log(w.flatten(1,2))
        return s.o(torch.einsum("bhgts,bshd->bthgd",w,v).reshape(B,T,-1))
for B,T,H,G,D in [(3,5,2,2,4),(1,5,2,2,4),(2,4,2,3,4),(2,7,3,2,4),(1,7,2,4,8),(1,1,2,2,4),(2,6,2,2,3)]:
    torch.manual_seed(0); m=M(B,T,H,G,D); x=torch.randn(B,T,8)
    check(f"GQA5 {B,T,H,G,D}",m,lambda:m(x))
