from lib import *
import tempfile
from regard.stats import *
torch.manual_seed(0)
class M(nn.Module):
    def forward(s,q,k,v): return (q@k.mT*.5).masked_fill(~rm,-torch.inf).softmax(-1)@v
q,k,v=torch.randn(3,2,3,5,4).unbind(0)
rm=torch.rand(5,5)<.6; rm[2]=False; rm[:,4]=False
m=M()
with regard.watch(m,keep="qkv") as seen: o=m(q,k,v)
print(seen); print("model's out row 2:",o[0,0,2])
r=seen.records[0]; print(r, r.shape)
print("weights", r.weights(heads=0))
print("lse", r.lse[0]); print("entropy",np.asarray(entropy(r))[0]); print("received",np.asarray(received(r))[0])
print("RowSums",np.asarray(walk(r,RowSums()))[0] if not isinstance(walk(r,RowSums()),tuple) else np.asarray(walk(r,RowSums())[0])[0])
print(seen.table()); print(seen.audit())
seen.save("x.regard"); b=regard.open("x.regard")
w0,w1=np.asarray(r.weights()),np.asarray(b.records[0].weights()); print("after load", np.nanmax(np.abs(w0-w1)), np.isnan(w0).sum(), np.isnan(w1).sum())
