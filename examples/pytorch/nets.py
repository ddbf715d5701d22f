# SPDX-License-Identifier: Apache-2.0
"""Networks that the benchmarks train."""
import types

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x))) + x


class Bottleneck(nn.Module):
    """He et al., Deep Residual Learning for Image Recognition, figure 5, with the stride in the middle."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet50(classes=1000):
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(count):
            layers.append(Bottleneck(inputs, width, stride if i == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def conv():
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *[Block(32) for _ in range(14)],
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def mlp():
    layers = [nn.Linear(64, 192), nn.GELU()]
    for _ in range(14):
        layers += [nn.Linear(192, 192), nn.LayerNorm(192), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(192, 10))


class Transformer(nn.Module):
    """A transformer of PyTorch's own layers. It classifies sequences by the output at their first place."""

    def __init__(self, hidden=128, layers=4, words=1000):
        super().__init__()
        self.words = nn.Embedding(words, hidden)
        layer = nn.TransformerEncoderLayer(hidden, hidden // 32, 4 * hidden, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x):
        return self.head(self.body(self.words(x))[:, 0])


#: Size of the vocabulary of `language_model`.
WORDS = 1000


class MlpModel(nn.Module):
    """A multilayer perceptron that is called in the same way as the models of transformers."""

    def __init__(self, hidden, layers):
        super().__init__()
        self.words = nn.Embedding(WORDS, hidden)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.GELU())
                                    for _ in range(4 * layers)])
        self.head = nn.Linear(hidden, WORDS)

    def forward(self, input_ids, labels):
        logits = self.head(self.body(self.words(input_ids)))
        return types.SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def language_model(name, hidden, layers):
    """Makes a small language model from its configuration: `bert`, `llama`, `t5` or `mamba` of transformers, `lora`
    (a Llama with adapters of peft), or an `mlp`, which needs neither package.
    """
    if name == "mlp":
        return MlpModel(hidden, layers)
    import transformers as tf
    heads = hidden // 64
    if name == "bert":
        return tf.BertForMaskedLM(tf.BertConfig(
            vocab_size=WORDS, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=4 * hidden))
    if name == "t5":
        return tf.T5ForConditionalGeneration(tf.T5Config(
            vocab_size=WORDS, d_model=hidden, num_layers=layers // 2, num_decoder_layers=layers // 2, num_heads=heads,
            d_kv=64, d_ff=4 * hidden, decoder_start_token_id=0))
    if name == "mamba":
        return tf.MambaForCausalLM(tf.MambaConfig(vocab_size=WORDS, hidden_size=hidden, num_hidden_layers=layers))
    if name not in ("llama", "lora"):
        raise SystemExit(f"no such model: {name}")
    model = tf.LlamaForCausalLM(tf.LlamaConfig(
        vocab_size=WORDS, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, intermediate_size=3 * hidden))
    if name == "llama":
        return model
    import peft
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=[
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]))


#: Types of layers that checkpointing computes again.
CHECKPOINTED = (Block, Bottleneck, nn.LayerNorm, nn.TransformerEncoderLayer)


def checkpointed(model, x):
    """Returns `model(x)` for a network of `make`, most of whose activations are computed again in the backward pass."""
    if isinstance(model, Transformer):
        return model.head(checkpointed(model.body.layers, model.words(x))[:, 0])
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False) if isinstance(layer, CHECKPOINTED) else layer(x)
    return x


def make(net, batch=None, size=None):
    """Makes a network, with inputs and labels for one step."""
    if net == "mlp":
        batch = batch or 4096
        return mlp(), torch.randn(batch, 64), torch.randint(0, 10, (batch,))
    if net == "resnet50":
        batch, size = batch or 4, size or 128
        return resnet50(), torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))
    if net == "transformer":
        batch = batch or 32
        return Transformer(size or 128), torch.randint(0, 1000, (batch, 128)), torch.randint(0, 10, (batch,))
    batch, size = batch or 16, size or 64
    return conv(), torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))


def compute_the_same_each_time():
    """Makes CUDA compute the same bits in each run, where PyTorch can."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Otherwise each new tensor is filled with NaN, by a kernel of its own.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # it may be nondeterministic nevertheless


def training_step(net, batch=None, size=None, foreach=None):
    """Returns a function that trains a network of `make` for one step. Each network begins with the same weights."""
    torch.manual_seed(0)
    model, x, y = make(net, batch, size)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=foreach)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return step
