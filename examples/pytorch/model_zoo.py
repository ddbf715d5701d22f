# SPDX-License-Identifier: Apache-2.0
"""Trains models of many kinds, with several training loops, with a part of the memory that they need, and checks that the
results are bitwise the same.

    python model_zoo.py [NAME ...] [--parts 0.5 0.35 | --smallest 1.1] [--steps 4] [--time-limit 600]

Each NAME is a key of ZOO, by default every one, and runs in a process of its own; a missing package is a failure. The
process trains without a limit first, which gives the peak and the expected results, and then with each given part of the
peak. With --smallest the limits are multiples of the smallest limit that `spillway_torch.plan` predicts, which is what the
largest operation needs at once. Models are made from their configurations with random weights, so nothing is downloaded.
The table shows whether losses and weights are bitwise the same; the CPU time of the shortest step from the third one on,
without and with the limit; the swapped bytes; and the part of the additional time that is not spent in copies
(step_cost.py). Exit status 1 if a bit differs or a run fails.
"""
import argparse
import gc
import hashlib
import importlib
import importlib.util
import multiprocessing
import os
import sys
import tempfile

from progress import progress, say
from step_cost import MIB, Steps, compare, seconds_per_byte


def train(steps, model, loss_of, optimizer=None):
    """Trains a model with a plain PyTorch loop."""
    import torch
    model.train()
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def step(_):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        return loss.item()
    steps.run(step)
    return model


def classify(steps, model, pixels, batch):
    import torch
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(10, (batch,))
    return train(steps, model, lambda m: torch.nn.functional.cross_entropy(m(images), labels),
                 torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))


def vision(steps, name, pixels, batch, **options):
    import torchvision
    return classify(steps, torchvision.models.get_model(name, weights=None, num_classes=10, **options), pixels, batch)


def convnext(steps):
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt
    return classify(steps, ConvNeXt([CNBlockConfig(48, 96, 2), CNBlockConfig(96, 192, 2), CNBlockConfig(192, None, 2)],
                                    stochastic_depth_prob=0.1, num_classes=10), 96, 8)


def densenet(steps):
    from torchvision.models import DenseNet
    return classify(steps, DenseNet(16, (4, 6, 4), 32, num_classes=10), 96, 8)


def vit(steps):
    from torchvision.models import VisionTransformer
    return classify(steps, VisionTransformer(64, 8, num_layers=3, num_heads=4, hidden_dim=256, mlp_dim=1024, dropout=0.1,
                                             num_classes=10), 64, 16)


def text(batch=8, length=128, letters=512):
    import torch
    return torch.randint(letters, (batch, length))


def language(steps, model, batch=8, length=128, **inputs):
    ids = text(batch, length)
    return train(steps, model, lambda m: m(input_ids=ids, labels=ids, use_cache=False, **inputs).loss)


def bert(steps):
    from transformers import BertConfig, BertForMaskedLM
    model = BertForMaskedLM(BertConfig(vocab_size=512, hidden_size=256, num_hidden_layers=3, num_attention_heads=4,
                                       intermediate_size=1024))
    ids = text()
    return train(steps, model, lambda m: m(input_ids=ids, labels=ids).loss)


def new_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=256, n_layer=3, n_head=4, n_positions=128))


def new_llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=3,
                                        num_attention_heads=4, num_key_value_heads=2))


def t5(steps):
    from transformers import T5Config, T5ForConditionalGeneration
    model = T5ForConditionalGeneration(T5Config(vocab_size=512, d_model=192, d_kv=48, d_ff=768, num_layers=2, num_heads=4,
                                                decoder_start_token_id=0))
    ids = text()
    return train(steps, model, lambda m: m(input_ids=ids, labels=ids, use_cache=False).loss)


def mamba(steps):
    from transformers import MambaConfig, MambaForCausalLM
    return language(steps, MambaForCausalLM(MambaConfig(vocab_size=512, hidden_size=192, num_hidden_layers=3,
                                                        use_mambapy=False)), 4, 48)


def unet(steps):
    import torch
    from diffusers import UNet2DModel
    model = UNet2DModel(32, 3, 3, layers_per_block=1, block_out_channels=(32, 64, 96), norm_num_groups=8,
                        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
                        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"))
    images, noise, when = torch.randn(8, 3, 32, 32), torch.randn(8, 3, 32, 32), torch.randint(1000, (8,))
    return train(steps, model, lambda m: torch.nn.functional.mse_loss(m(images, when).sample, noise))


def vae(steps):
    import torch
    from diffusers import AutoencoderKL
    model = AutoencoderKL(down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
                          block_out_channels=(32, 64), layers_per_block=1, latent_channels=4, norm_num_groups=8)
    images = torch.randn(4, 3, 48, 48)
    return train(steps, model, lambda m: torch.nn.functional.mse_loss(
        m(images, sample_posterior=True).sample, images))


def lora(steps):
    import peft
    model = peft.get_peft_model(new_llama(), peft.LoraConfig(r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
    return language(steps, model)


def trainer(steps):
    """Trains with the loop of transformers, which also saves checkpoints."""
    import transformers
    ids = text(32)

    class Watch(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                steps.add(logs["loss"])
    with tempfile.TemporaryDirectory() as folder:
        transformers.Trainer(
            model=new_gpt2(), train_dataset=[{"input_ids": row, "labels": row} for row in ids], callbacks=[Watch()],
            args=transformers.TrainingArguments(
                folder, per_device_train_batch_size=8, max_steps=steps.count, logging_steps=1, save_steps=2, report_to=[],
                use_cpu=True, disable_tqdm=True, seed=7, gradient_checkpointing=True, dataloader_pin_memory=False)).train()
        last = os.path.join(folder, f"checkpoint-{steps.count}")
        return transformers.GPT2LMHeadModel.from_pretrained(last)


def lightning(steps):
    import lightning as pl
    import torch
    import torchvision

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torchvision.models.mobilenet_v3_small(weights=None, num_classes=10)

        def training_step(self, batch, index):
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            steps.add(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
    model = Module()
    data = torch.utils.data.TensorDataset(torch.randn(64, 3, 64, 64), torch.randint(10, (64,)))
    pl.Trainer(max_steps=steps.count, accelerator="cpu", logger=False, enable_checkpointing=False, precision="bf16-mixed",
               enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.).fit(
        model, torch.utils.data.DataLoader(data, batch_size=16))
    return model


def accelerate(steps):
    import torch
    from accelerate import Accelerator
    loop = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = new_llama()
    model, optimizer = loop.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    ids = text(4)

    def step(_):
        for part in ids.split(2):
            with loop.accumulate(model):
                loss = model(input_ids=part, labels=part, use_cache=False).loss
                loop.backward(loss)
                loop.clip_grad_norm_(model.parameters(), 1.)
                optimizer.step()
                optimizer.zero_grad()
        return loss.item()
    steps.run(step)
    return model


def lstm(steps):
    import torch
    model = torch.nn.LSTM(128, 192, num_layers=2, dropout=0.1, bidirectional=True)
    x, y = torch.randn(48, 32, 128), torch.randn(48, 32, 384)
    return train(steps, model, lambda m: torch.nn.functional.mse_loss(m(x)[0], y))


def compiled(steps):
    """Trains a model that is one compiled graph, forward and backward."""
    import torch
    model = new_gpt2()
    run, ids = torch.compile(model), text()
    return train(steps, model, lambda m: run(input_ids=ids, labels=ids, use_cache=False).loss)


#: The functions that train, and the packages that each needs.
ZOO = {
    "ResNet-18": (lambda steps: vision(steps, "resnet18", 64, 8), "torchvision"),
    "EfficientNet-B0": (lambda steps: vision(steps, "efficientnet_b0", 64, 8), "torchvision"),
    "ConvNeXt": (convnext, "torchvision"), "DenseNet": (densenet, "torchvision"), "ViT": (vit, "torchvision"),
    "BERT": (bert, "transformers"), "GPT-2": (lambda steps: language(steps, new_gpt2()), "transformers"),
    "Llama": (lambda steps: language(steps, new_llama()), "transformers"), "T5": (t5, "transformers"),
    "Mamba": (mamba, "transformers"), "UNet": (unet, "diffusers"), "AutoencoderKL": (vae, "diffusers"),
    "Llama with LoRA": (lora, "peft"), "GPT-2, Trainer": (trainer, "transformers"),
    "MobileNetV3, Lightning, bfloat16": (lightning, "lightning"), "Llama, accelerate": (accelerate, "accelerate"),
    "LSTM": (lstm, "torch"), "GPT-2, compiled": (compiled, "transformers"),
}


def work(name, options):
    """Trains one model without a limit and with each part, and prints its lines of the table."""
    import torch

    import spillway_torch
    torch.set_num_threads(1)
    if options.smallest:
        with spillway_torch.plan(limits=["1GiB"], out=None) as plan:
            ZOO[name][0](Steps(2, dict))
        gc.collect()
    spillway_torch.install(device="cpu", limit=2 << 30)
    spillway_torch.set_enabled_lms(True)
    spillway_torch.set_codec(options.codec)

    def run():
        torch.manual_seed(7)
        steps = Steps(options.steps, spillway_torch.memory_stats)
        model = ZOO[name][0](steps)
        digests = [hashlib.sha256(bytes(w.detach().contiguous().flatten().view(torch.uint8).numpy())).hexdigest()
                   for w in model.state_dict().values()]
        del model
        gc.collect()
        return steps, digests
    if name.endswith("compiled"):
        run()  # a first run, since compiling also uses memory
        spillway_torch.reset_peak_memory_stats()
    free, free_weights = run()
    free_ms = 1e3 * free.least()["seconds"]
    peak = spillway_torch.memory_stats()["tensor_bytes.all.peak"]
    failed = False
    least, factors = (plan.smallest_limit, options.smallest) if options.smallest else (peak, options.parts)
    for limit in (int(factor * least) for factor in factors):
        spillway_torch.set_limit_lms(limit)
        part = f"{limit / peak:.3g}"
        try:
            tight, tight_weights = run()
        except torch.OutOfMemoryError as error:
            failed = True
            print(error, file=sys.stderr)
            say(f"| {name} | {peak / MIB:.0f} | {part} | out of memory | {free_ms:.0f} | | | | | |")
            continue
        is_same = free.losses == tight.losses and free_weights == tight_weights
        failed = failed or not is_same
        cost = compare(free.least(), tight.least(), seconds_per_byte())
        say(f"| {name} | {peak / MIB:.0f} | {part} | {'yes' if is_same else 'NO'} | {free_ms:.0f} | {cost['capped_ms']:.0f} | "
            f"{cost['capped_ms'] / free_ms:.2f} | {tight.mean('swap_out_bytes') / MIB:.0f} | "
            f"{tight.mean('swap_in_bytes') / MIB:.0f} | {100 * cost['rest']:.0f} % |")
    sys.exit(failed)


def work_aside(name, options, errors):
    """Trains one model in a process of its own, whose messages go to a file. Returns what went wrong, or nothing."""
    def run():
        os.dup2(errors.fileno(), 2)
        work(name, options)
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(options.time_limit)
    if process.is_alive():
        process.kill()
        process.join()
        return f"not done after {options.time_limit:g} seconds"
    if process.exitcode != 0:
        errors.seek(0)
        return f"exit status {process.exitcode}\n{errors.read()[-3000:]}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--parts", type=float, nargs="+", default=[0.5, 0.35])
    parser.add_argument("--smallest", type=float, nargs="+", help="instead of --parts")
    parser.add_argument("--codec", choices=["lossless"], help="how tensors are encoded while they are away")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--time-limit", type=float, default=600, help="seconds for each NAME")
    options = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    names = options.names or list(ZOO)
    available = {package for package in {ZOO[name][1] for name in names} if importlib.util.find_spec(package) is not None}
    for package in available:  # imported once, for all processes
        importlib.import_module(package)
    print("| model | peak, MiB | part | bitwise | CPU ms/step | with the limit | ratio | out, MiB/step | in, MiB/step | "
          "the rest |\n|---|---:|---:|---|---:|---:|---:|---:|---:|---:|", flush=True)
    failed = False
    for name in progress(names):
        package = ZOO[name][1]
        with tempfile.TemporaryFile("w+") as errors:
            wrong = work_aside(name, options, errors) if package in available else f"not run, it needs the package {package}"
        if wrong:
            failed = True
            print(f"{name}: {wrong}", file=sys.stderr, flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
