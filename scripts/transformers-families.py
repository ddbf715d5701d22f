#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains tiny models of the model families of `transformers`, generates text with them, with and
without support, and compares the results bit by bit.

    build/pytorch-2.15.0/bin/python scripts/transformers-families.py [--recompute] MAPPING ...

MAPPING names a table of the automatic classes: CAUSAL_LM, SEQ_TO_SEQ_CAUSAL_LM, MASKED_LM,
IMAGE_CLASSIFICATION and so on. For each family in the table a model is made from a smaller copy of
its default configuration, with random weights, so that nothing is downloaded. A digest of outputs,
gradients and weights is compared, and the text of errors. With support, a thread evicts every
tensor that no operation uses, every two milliseconds by default, as in
scripts/framework-tests.py. A family is left out if its smaller configuration is inconsistent or
its model is still large. Exit status 1 if there is a difference.
"""
import argparse
import contextlib
import copy
import hashlib
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import threading
import time

WHOLE = "the model"
SWAPPED = "bytes swapped out"
MOST_PARAMETERS = 12_000_000
TABLES = "rope_scaling rope_parameters id2label label2id".split()
WORDS = 160
SMALL = {
    0: "num_kv_shared_layers num_nextn_predict_layers",
    1: """n_shared_experts n_group topk_group first_k_dense_replace attn_layer_offset
          expert_layer_offset""",
    2: """num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers depth
          num_decoder_layers num_key_value_heads num_experts_per_tok type_vocab_size
          linear_num_key_heads attn_layer_period expert_layer_period full_attention_interval
          global_attn_every_n_layers""",
    4: """num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads
          num_heads num_experts num_local_experts n_routed_experts linear_num_value_heads""",
    8: """head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim sliding_window patch_size
          window_size state_size mamba_d_state rotary_dim mamba_num_heads mamba_head_dim
          linear_key_head_dim linear_value_head_dim chunk_size hidden_size_per_layer_input
          num_queries""",
    16: "q_lora_rank kv_lora_rank num_mel_bins projection_dim",
    32: """hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim
           moe_intermediate_size lru_width shared_expert_intermediate_size image_size
           out_hidden_size""",
    64: """intermediate_size ffn_dim d_ff d_inner encoder_ffn_dim decoder_ffn_dim n_inner
           hidden_dim""",
    128: "max_position_embeddings n_positions",
    WORDS: "vocab_size text_vocab_size vocab_size_per_layer_input",
}
SIZES = {name: size for size, names in SMALL.items() for name in names.split()}


def made_small(settings):
    for name, value in settings.items():
        if isinstance(value, dict) and name not in TABLES:
            made_small(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            if name.endswith(("_token_id", "_token_index")):
                settings[name] = {"pad": 0, "bos": 1, "eos": 2}.get(name[:3], 3 + len(name))
            else:
                settings[name] = SIZES.get(name, value)
    if settings.get("kv_lora_rank") and "num_key_value_heads" in settings:
        # Latent attention does not group heads: as many for keys and values as for queries.
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if isinstance(settings.get(name), list):  # at most two layers, of different kinds if there are any
            settings[name] = (list(dict.fromkeys(settings[name])) * 2)[:2]
    return settings


def new_model(family, class_name):
    import torch
    import transformers
    kind = transformers.CONFIG_MAPPING[family]
    settings = kind().to_dict()
    for name in ("transformers_version", "architectures", "dtype", "per_layer_config"):
        settings.pop(name, None)
    config = kind.from_dict(made_small(settings))
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"the model is large: {size} parameters")
    torch.manual_seed(3)
    return model_class(config)


def inputs_of(model):
    import torch
    generator = torch.Generator().manual_seed(11)
    vision = getattr(model.config, "vision_config", None) or model.config
    pixels = getattr(vision, "image_size", 64)
    pixels = pixels if isinstance(pixels, int) else pixels[0]
    name = model.main_input_name
    if name == "input_ids":
        return {name: torch.randint(100, 150, (2, 12), generator=generator)}
    shapes = {"pixel_values": (2, getattr(vision, "num_channels", 3), pixels, pixels),
              "input_values": (2, 4000),
              "input_features": (2, getattr(model.config, "num_mel_bins", 16), 128)}
    return {name: torch.randn(shapes[name], generator=generator)}


def tensors_in(thing):
    import torch
    if isinstance(thing, torch.Tensor):
        return [thing]
    if hasattr(thing, "values"):
        thing = thing.values()
    elif not isinstance(thing, (list, tuple)):
        return []
    return [tensor for part in thing for tensor in tensors_in(part)]


def digest(*things):
    import torch
    found = hashlib.sha1()
    for tensor in tensors_in(things):
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().contiguous().flatten()
        found.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return found.hexdigest()


def parts_of(model, generates):
    """Yields the parts of the test of a model: a name, and a function that returns what to compare."""
    import torch
    inputs = inputs_of(model)
    speaks = "LM" in type(model).__name__ and "input_ids" in inputs
    labels = {"labels": inputs["input_ids"]} if speaks else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forward():
        with torch.no_grad():
            return model.eval()(**inputs)

    def backward():
        optimizer.zero_grad()
        out = model.train()(**inputs, **labels)
        loss = out.loss if labels else sum(
            tensor.float().square().mean() for tensor in tensors_in(out) if tensor.requires_grad)
        loss.backward()
        return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]

    def step():
        gradients = backward()
        optimizer.step()
        return [gradients, model.state_dict()]

    def autocast():
        with torch.autocast("cpu", torch.bfloat16):
            return backward()

    def checkpointing():
        model.gradient_checkpointing_enable()
        try:
            return backward()
        finally:
            model.gradient_checkpointing_disable()

    def saved():
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return type(model).from_pretrained(folder).state_dict()

    def generate(sequences=2, **options):
        given = {name: value[:sequences] for name, value in inputs.items()}
        given |= {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
        given |= options
        return lambda: model.eval().generate(**given)

    yield from {"forward": forward, "step": step, "autocast": autocast,
                "checkpointing": checkpointing, "saved": saved,
                "copied": lambda: copy.deepcopy(model).state_dict()}.items()
    if generates:
        yield "greedy", generate()
        yield "beams", generate(num_beams=3, num_return_sequences=2)
        yield "sampling", generate(do_sample=True, top_k=20, top_p=0.9)
        yield "sampled beams", generate(do_sample=True, num_beams=2, repetition_penalty=1.3,
                                        no_repeat_ngram_size=2)
        yield "scores", generate(return_dict_in_generate=True, output_scores=True)
        yield "static cache", generate(cache_implementation="static", disable_compile=True)
        yield "without a cache", generate(use_cache=False)
        yield "looked up", generate(1, prompt_lookup_num_tokens=3)
        yield "assisted", generate(1, assistant_model=copy.deepcopy(model))


def work(options):
    """Tests the families of one mapping in this process, and writes a line for each part."""
    import numpy
    import torch
    import transformers
    from transformers.models.auto import modeling_auto
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if options.every_ms:
        import spillway_torch
        spillway_torch.install(device="cpu", limit=6 << 30, least_bytes=1)
        spillway_torch.set_enabled_lms(True)
        spillway_torch.set_recompute(options.recompute)

        def reclaim_all():
            while True:
                spillway_torch.reclaim_inactive()
                time.sleep(options.every_ms / 1000)
        threading.Thread(target=reclaim_all, daemon=True).start()
    mapping, = options.mappings
    with open(options.worker, "w") as file:
        def write(name, part, result):
            print(json.dumps([name, part, result]), file=file, flush=True)

        def attempt(name, part, function):
            torch.manual_seed(7)
            numpy.random.seed(7)
            random.seed(7)
            try:
                write(name, part, digest(function()))
            except Exception as error:  # errors are compared, too
                text = re.sub("0x[0-9a-f]+", "0x", f"{type(error).__name__}: {error}")
                write(name, part, "error: " + text[:300])
        families = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        for family, name in families.items():
            try:
                model = new_model(family, name if isinstance(name, str) else name[0])
                parts = list(parts_of(model, mapping.endswith("CAUSAL_LM")))
            except Exception as error:  # the small configuration is inconsistent
                write(family, WHOLE, f"error: {type(error).__name__}")
                continue
            for part, function in parts:
                attempt(family, part, function)
        write("", SWAPPED,
              spillway_torch.memory_stats()["swap_out_bytes"] if options.every_ms else 0)
    os._exit(0)  # without waiting for the evicting thread


def run(options, mapping, every_ms):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "results"
        command = [sys.executable, __file__, "--worker", str(path), "--every-ms", str(every_ms),
                   *["--recompute"] * options.recompute, mapping]
        with contextlib.suppress(subprocess.TimeoutExpired):  # parts that were not reached are missing in the result
            subprocess.run(command, check=False, timeout=options.patience_s,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
        lines = path.read_text().splitlines() if path.exists() else []
        return {(name, part): result for name, part, result in map(json.loads, lines)}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mappings", nargs="+", metavar="MAPPING")
    parser.add_argument("--recompute", action="store_true", help="with set_recompute(True)")
    parser.add_argument("--every-ms", type=float, default=2)
    parser.add_argument("--patience-s", type=float, default=3600,
                        help="a process that takes longer is stopped")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
    differences = []
    print("| mapping | families | left out | parts | errors | different with support | "
          "swapped out, MiB |\n|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for mapping in options.mappings:
        expected, seen = run(options, mapping, 0), run(options, mapping, options.every_ms)
        swapped = seen.pop(("", SWAPPED), None)
        ended = expected.pop(("", SWAPPED), None) is not None and swapped is not None
        wrong = [f"{mapping}, {' '.join(key)}: {expected.get(key)}, with support {seen.get(key)}"
                 for key in {**expected, **seen} if expected.get(key) != seen.get(key)]
        wrong += [] if ended else [f"{mapping}: a run ended early"]
        left_out = [name for name, part in expected if part == WHOLE]
        parts = [result for (_, part), result in expected.items() if part != WHOLE]
        errors = [result for result in parts if result.startswith("error")]
        families = {name for name, _ in expected}
        print(f"| {mapping} | {len(families) - len(left_out)} | {len(left_out)} | {len(parts)} | "
              f"{len(errors)} | {len(wrong)} | {(swapped or 0) / (1 << 20):.1f} |", flush=True)
        differences += wrong
    print("\n".join(differences))
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
