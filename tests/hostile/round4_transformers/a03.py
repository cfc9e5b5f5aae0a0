from h import *; from m import CF
for n in ("gpt_oss","llama"):
  m=build(CF[n](),impl="eager")
  for toks in ([5],[5,6],[5,5]):
    with regard.watch(m,keep="qkv") as s, torch.no_grad():
        for t in toks: m(torch.tensor([[t]]))
    print(n,toks,s, s.recording.sequences, s.recording.tokens)
    for r in s.records: print(r.name,r.weights().flatten().tolist(), r.q_positions)
  with regard.watch(m,keep="qkv") as s, torch.no_grad():
    m(torch.tensor([[5],[6]]))
  print(n,"batch",s, s.recording.sequences, s.recording.tokens)
  with regard.watch(m,keep="qkv") as s, torch.no_grad():
    c=m(torch.tensor([[5]])).past_key_values; c=m(torch.tensor([[6]]),past_key_values=c).past_key_values; m(torch.tensor([[7]]))
  print(n,"2 steps then other",s, s.recording.sequences, s.recording.tokens)
