# SPDX-License-Identifier: Apache-2.0
"""Trains the network of examples/pytorch/train_digits.py and writes the tensors that a step keeps to raw files, as input
for `bench_codec`: activations before and after ReLU, weights, gradients, and all of these in bfloat16.

    python dump_tensors.py FOLDER [--epochs 4] [--batch 256]
"""
import argparse
import pathlib
import sys

import torch
import torch.nn.functional as F

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples" / "pytorch"


def network():
    """Returns the functions of the example, without its import of spillway_torch, which is not needed here."""
    sys.path.insert(0, str(EXAMPLES))  # the example imports modules from its own folder
    source = (EXAMPLES / "train_digits.py").read_text().replace("import spillway_torch\n", "")
    names = {"__name__": "train_digits", "__file__": str(EXAMPLES / "train_digits.py")}
    exec(compile(source, "train_digits.py", "exec"), names)
    return names["load"](names["DIGITS"]), names["make"]()


def write(folder, name, tensors):
    for tensor_type, ending, as_bits in ((torch.float32, "f32", torch.int32), (torch.bfloat16, "bf16", torch.int16)):
        data = b"".join(t.detach().to(tensor_type).contiguous().view(as_bits).numpy().tobytes() for t in tensors)
        (folder / f"{name}.{ending}").write_bytes(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(1)
    ((pictures, digits), (test_pictures, test_digits)), model = network()
    kept = {"relu": [], "before_relu": []}
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(options.epochs):
        for batch in torch.randperm(len(pictures)).split(options.batch):
            optimizer.zero_grad()
            F.cross_entropy(model(pictures[batch]), digits[batch]).backward()
            optimizer.step()

    def keep(_, inputs, result):
        kept["before_relu"].append(inputs[0])
        kept["relu"].append(result)

    for layer in model:
        if isinstance(layer, torch.nn.ReLU):
            layer.register_forward_hook(keep)
    optimizer.zero_grad()
    F.cross_entropy(model(pictures[:options.batch]), digits[:options.batch]).backward()
    for name, tensors in kept.items():
        write(options.folder, name, tensors)
    write(options.folder, "weights", list(model.parameters()))
    write(options.folder, "gradients", [p.grad for p in model.parameters()])
    right = (model(test_pictures).argmax(1) == test_digits).float().mean().item()
    print(f"{right:.1%} of the test pictures right", file=sys.stderr)


if __name__ == "__main__":
    main()
