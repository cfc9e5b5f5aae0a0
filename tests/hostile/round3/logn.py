"""Situations: the scale grows with the length, as in log-n scaling while decoding."""

import torch
from half import Fp32, Sdpa, make
from oracle import COUNT, Core, situation


def grown(base, rate, kernel=None):
    class Grown(base):
        """The scale is a number of Python that depends on the number of keys."""

        def logits(self, m, q, k, mask):
            s = q @ k.transpose(-1, -2) * (8**-0.5 * self.factor(k))
            return s + mask.to(s.dtype)

        def factor(self, k):
            return 1 + rate * max(0, k.shape[2] - 9)

        def __call__(self, m, q, k, v, mask):
            self.scale = 8**-0.5 * self.factor(k)
            self.kernel = base.kernel
            if kernel:
                self.kernel = kernel if q.shape[2] == 1 else "eager"
            return super().__call__(m, q, k, v, mask)

    return Grown()


def main():
    for rate in (0.003, 0.01, 0.03):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            half = dtype is not torch.float32
            for base, kernel in ((Core, None), (Fp32, None), (Sdpa, None),
                                 (Core, "sdpa")):  # fmt: skip
                name = f"log-n {rate} {base.__name__} {kernel} {str(dtype)[6:]}"
                tol = 0.08 if dtype is torch.bfloat16 else None
                situation(name, make(grown(base, rate, kernel), dtype, steps=5),
                          half=half, tol=tol)  # fmt: skip
    print(COUNT)


if __name__ == "__main__":
    main()
