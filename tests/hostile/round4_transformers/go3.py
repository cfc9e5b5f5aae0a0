import t03_cache as t
t.S={k:v for k,v in t.S.items() if 'crop' in k or 'specul' in k}
t.main([("llama","sdpa"),("llama","eager"),("bloom","eager"),("gpt2","sdpa"),("deepseek_v3","sdpa"),("qwen3","eager")]); t.done()
