# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a small transformer on text in a part of the memory it needs, then writes with it.

    python finetune_transformer.py [--limit-mib 96] [--steps 30] [--layers 6] [--width 256] [--context 128] [--batch 16]
                                   [--accumulate 2] [--bf16] [--device cpu|cuda] [--text FILE]

Nothing is downloaded: the weights are random, and the text is this file unless another one is named. "Fine" tuning
here means that the lower half of the layers is frozen; their weights are only read.
"""
import argparse
import pathlib
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

import spillway_torch
from progress import progress, say


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.after = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, width = x.shape
        q, k, v = (part.view(n, t, self.heads, -1).transpose(1, 2) for part in self.mix(self.before(x)).split(width, 2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, t, width))
        return x + self.narrow(F.gelu(self.wide(self.after(x))))


class Transformer(nn.Module):
    def __init__(self, layers, width, context, heads=4, letters=256):
        super().__init__()
        self.context = context
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters)

    def forward(self, x):
        x = self.letter(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=float, default=96)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes for each step of the optimizer")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--text", type=pathlib.Path, default=pathlib.Path(__file__))
    options = parser.parse_args()

    spillway_torch.install(device=options.device, limit=int(options.limit_mib * (1 << 20)))
    spillway_torch.set_enabled_lms(True)

    torch.manual_seed(0)
    text = torch.tensor(list(options.text.read_bytes()))
    model = Transformer(options.layers, options.width, options.context).to(options.device)
    for layer in model.layers[:options.layers // 2]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    start = time.perf_counter()
    for step in progress(range(1, options.steps + 1)):
        optimizer.zero_grad()
        total = 0.
        for _ in range(options.accumulate):
            at = torch.randint(len(text) - options.context - 1, (options.batch,))
            rows = torch.stack([text[i:i + options.context + 1] for i in at]).to(options.device)
            with torch.autocast(options.device, dtype=torch.bfloat16, enabled=options.bf16):
                scores = model(rows[:, :-1])
            loss = F.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten()) / options.accumulate
            loss.backward()
            total += loss.item()
        optimizer.step()
        if step % 5 == 0 or step == options.steps:
            now = spillway_torch.memory_stats()
            say(f"step {step}: loss {total:.4f}, {(time.perf_counter() - start) / step:.2f} s a step, "
                f"tensors at most {now['tensor_bytes.all.peak'] / (1 << 20):.0f} MiB, "
                f"swapped out {now['swap_out_bytes'] / (1 << 20):.0f} MiB, in {now['swap_in_bytes'] / (1 << 20):.0f} MiB")

    spillway_torch.page(model)
    line = text[None, :options.context // 2].to(options.device)
    with torch.no_grad():
        for _ in range(options.context // 2):
            line = torch.cat([line, model(line)[:, -1:].argmax(-1)], 1)
    print("it writes:", repr(bytes(line[0, options.context // 2:].tolist())))


if __name__ == "__main__":
    main()
