from lib import *
class M(nn.Module):
    def __init__(s):
        super().__init__(); s.p=nn.Linear(8,24); s.o=nn.Linear(8,8)
    def forward(s,x):
        B,T,C=x.shape
        q,k,v=s.p(x).view(B,T,3,2,4).permute(2,0,3,1,4)
        w=torch.softmax(q@k.transpose(-1,-2)/2,-1); log(w)
        return s.o((w@v).transpose(1,2).reshape(B,T,C))
torch.manual_seed(0)
m=M(); x=torch.randn(3,5,8)
seen=check("base",m,lambda:m(x),verbose=True)
r=seen.records[0]; print(r); print(dir(seen.recording))
