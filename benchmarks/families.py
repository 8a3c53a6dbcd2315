"""Which model families run: tiny random models of each, scored by every side at tensor-parallel sizes 1 and 2.

    python -m benchmarks.families                        all, with a table and one JSON object as the last line
    python -m benchmarks.families qwen2 gemma2 --tp 1    some
    python -m benchmarks.families --json results.json --write docs/families.md
    python -m benchmarks.families --merge a.json b.json --write docs/families.md      of earlier results

Each family is made from its transformers configuration with random weights, biases, norms and persistent buffers, so
that whatever is dropped or swapped shows. Then both engines of a run are started, weights are synced, and the probes of
``hybridengine doctor parity`` are scored by the rollout engine, the trainer (packed and padded) and plain transformers.

    right      every token's log-probability agrees within ``TOLERANCE``
    refused    validation said no, by name, before any engine started
    wrong      it ran and disagrees
    crashed    anything else
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

#: |difference| of log-probabilities in float32 on a CPU.
TOLERANCE = 1e-4
CONTEXT, SECONDS = 96, 240.0
_PRELOAD = ["torch", "torch.distributed.fsdp", "transformers", "transformers.models.auto.modeling_auto", "vllm",
            "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "torch._inductor.config"]  # fmt: skip

#: What every tiny model has, unless its family says otherwise. Head sizes are those of vLLM's CPU attention.
BASE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
MLA = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "head_dim": None, "num_key_value_heads": 4,
}  # fmt: skip
LONG_FACTORS = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 48,
    "short_factor": [1.0 + 0.05 * i for i in range(16)], "long_factor": [1.5 + 0.4 * i for i in range(16)],
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True, slots=True)
class Family:
    """``kind``: transformers' model type; ``changes``: configuration keys; None removes one of BASE."""

    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    #: Context of the run, tokens.
    context: int = CONTEXT
    #: The checkpoint has an output projection of its own beside a config.json that ties it.
    own_head: bool = False
    #: As published checkpoints spell it, where transformers' class has another name.
    architecture: str | None = None


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": Family("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}}),
    "linear-rope": Family("llama", {"max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "dynamic-rope": Family("llama", {"rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    "mistral": Family("mistral", {"sliding_window": 32}),
    "ministral": Family("ministral", {"sliding_window": 32}),
    "ministral3": Family("ministral3"),
    "qwen2": Family("qwen2"),
    "qwen2-tied": Family("qwen2", {"tie_word_embeddings": True}),
    "qwen2-own-head": Family("qwen2", {"tie_word_embeddings": True}, own_head=True),
    "qwen2-yarn": Family("qwen2", {"max_position_embeddings": 64, "rope_parameters": YARN}),
    "qwen2-yarn-scaled": Family("qwen2", {"max_position_embeddings": 256, "rope_parameters": YARN}),
    "qwen2-max-window-layers": Family("qwen2", {
        "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}),
    "qwen3": Family("qwen3"),
    "qwen2-moe": Family("qwen2_moe", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64}),
    "qwen3-moe": Family("qwen3_moe", {**EXPERTS, "num_experts": 4}),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": Family("gemma", {"tie_word_embeddings": True}),
    "gemma2": Family("gemma2", {
        "tie_word_embeddings": True, "sliding_window": 32, "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": Family("gemma3_text", {
        "tie_word_embeddings": True, "sliding_window": 32, "query_pre_attn_scalar": 32}),
    "vaultgemma": Family("vaultgemma", {
        "tie_word_embeddings": True, "sliding_window": 32, "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "phi": Family("phi", {"num_key_value_heads": 4}),
    "phi3": Family("phi3"),
    "phi3-longrope-short": Family("phi3", {"original_max_position_embeddings": 48, "rope_parameters": LONG_FACTORS},
                                  context=48),
    "phi3-longrope": Family("phi3", {"original_max_position_embeddings": 48, "rope_parameters": LONG_FACTORS}),
    "phimoe": Family("phimoe", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
        architecture="PhiMoEForCausalLM"),
    "phimoe-renamed": Family("phimoe", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True}),
    "glm": Family("glm"),
    "glm4": Family("glm4"),
    "glm4-moe": Family("glm4_moe", {
        **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": True}),
    "exaone4": Family("exaone4", {"sliding_window": 32, "sliding_window_pattern": 4}),
    "granite": Family("granite", {
        "logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3}),
    "granite-moe": Family("granitemoe", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 4.0}),
    "ernie4.5": Family("ernie4_5"),
    "ernie4.5-moe": Family("ernie4_5_moe", {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_interval": 1}),
    "dots1": Family("dots1", {
        **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": True}),
    "olmo": Family("olmo"),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo3", {"sliding_window": 32, "num_hidden_layers": 4}),
    "olmoe": Family("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "flex-olmo": Family("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "apertus": Family("apertus"),
    "arcee": Family("arcee"),
    "seed-oss": Family("seed_oss"),
    "smollm3": Family("smollm3", {"no_rope_layer_interval": 2}),
    "starcoder2": Family("starcoder2", {"use_bias": True, "tie_word_embeddings": True}),
    "stablelm": Family("stablelm"),
    "nemotron": Family("nemotron"),
    "cohere": Family("cohere", {"tie_word_embeddings": True, "logit_scale": 0.25}),
    "cohere2": Family("cohere2", {
        "tie_word_embeddings": True, "logit_scale": 0.25, "sliding_window": 32, "num_hidden_layers": 4}),
    "cohere2-within-window": Family("cohere2", {
        "tie_word_embeddings": True, "logit_scale": 0.25, "sliding_window": 96, "num_hidden_layers": 4}),
    "helium": Family("helium"),
    "hunyuan": Family("hunyuan_v1_dense"),
    "cwm": Family("cwm", {"sliding_window": 32}),
    "opt": Family("opt", {
        "ffn_dim": 96, "word_embed_proj_dim": 128, "do_layer_norm_before": True, "tie_word_embeddings": True}),
    "gpt2": Family("gpt2", {
        "n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 96, "tie_word_embeddings": True}),
    "gpt-neox": Family("gpt_neox", {"num_key_value_heads": 4}),
    "gpt-bigcode": Family("gpt_bigcode", {
        "num_key_value_heads": None, "head_dim": None, "n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 256,
        "n_inner": 96, "tie_word_embeddings": True}),
    "gpt-j": Family("gptj", {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 16}),
    "falcon": Family("falcon", {
        "head_dim": None, "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True,
        "bias": False, "num_kv_heads": 1, "tie_word_embeddings": True}),
    "bloom": Family("bloom", {"n_layer": 3, "n_head": 4, "tie_word_embeddings": True}),
    "mpt": Family("mpt", {"d_model": 128, "n_heads": 4, "n_layers": 3, "max_seq_len": 256, "expansion_ratio": 1,
                          "tie_word_embeddings": True}),
    "gpt-oss": Family("gpt_oss", {
        "intermediate_size": 128,
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32, "head_dim": 64, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 64}}),
    "deepseek-v2": Family("deepseek_v2", {
        **EXPERTS, **MLA, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1}),
    "deepseek-v3": Family("deepseek_v3", {
        **EXPERTS, **MLA, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1}),
    "minicpm3": Family("minicpm3", {**MLA}),
    "nanochat": Family("nanochat", {"final_logit_softcapping": 3.0}),
    "bitnet": Family("bitnet"),
    "diffllama": Family("diffllama", {"num_key_value_heads": 2}),
    "mamba2": Family("mamba2", {"num_heads": 8, "head_dim": 32, "n_groups": 2, "state_size": 16}),
    "jamba": Family("jamba", {"num_experts": 2, "num_experts_per_tok": 1, "use_mamba_kernels": False}),
    "falcon-h1": Family("falcon_h1", {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32}),
    "lfm2": Family("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
}  # fmt: skip


def make_model(path: Path, family: Family, *, seed: int = 0) -> Path:
    """Write a random float32 model of ``family`` to ``path``."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from hybridengine.models.buffers import persistent_buffers

    keys = {**BASE, **family.changes}
    config = AutoConfig.for_model(family.kind, **{k: v for k, v in keys.items() if v is not None})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(1.0 + noise if parameter.dim() == 1 and bool((parameter == 1).all()) else noise)
        for buffer in persistent_buffers(model).values():
            buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(path)
    if family.architecture is not None:
        content = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**content, "architectures": [family.architecture]}))
    if family.own_head:
        file = path / "model.safetensors"
        tensors = load_file(file)
        tensors["lm_head.weight"] = 0.1 * torch.randn(tensors["model.embed_tokens.weight"].shape, generator=generator)
        save_file(tensors, file, metadata={"format": "pt"})
    return path


def config_for(path: Path, family: Family, tp: int) -> Any:
    """The configuration of a run on the model."""
    from hybridengine.config.compose import build
    from hybridengine.validate.resolve import resolve

    return resolve(
        build([
            f"model.path={path}", "data.train=arithmetic", "reward.fn=exact_match", "validate_every=0",
            f"rollout.tp={tp}", f"data.max_prompt_tokens={family.context - 16}", "rollout.max_tokens=16",
            "rollout.kv_cache_gib=0.0625", "rollout.max_num_seqs=16", "rollout.temperature=0.8",
            "parity.transformers=true", f"parity.tolerance={TOLERANCE}", "distributed.timeout_seconds=200",
        ])
    )  # fmt: skip


def probe(world: Any, path: str, family: Family, tp: int) -> dict[str, Any]:
    """On every rank: validate, start both engines, compare. Returns the outcome, what was found, and seconds."""
    from hybridengine.config.compose import ConfigError
    from hybridengine.distributed.world import init_process_group
    from hybridengine.parity.report import likely_cause
    from hybridengine.tools.doctor_parity import probe_model
    from hybridengine.validate.contradictions import validate

    begun = time.perf_counter()
    config = config_for(Path(path), family, tp)
    try:
        validate(config, world)
    except ConfigError as error:
        return {"outcome": "refused", "why": str(error), "seconds": time.perf_counter() - begun}
    init_process_group(world, timeout_seconds=200.0)
    notes: list[str] = []
    parity, hf_config = probe_model(config, world, log=notes.append)
    sides = {side: max(d.largest for d in found) for side, found in parity.against.items()}
    return {
        "outcome": "wrong" if parity.wrong else "right",
        "why": likely_cause(parity, hf_config) if parity.wrong else "",
        "lines": parity.lines(),
        "sides": sides,
        "largest": parity.largest,
        "seconds": time.perf_counter() - begun,
    }


# -- processes -------------------------------------------------------------------------------------


def run_family(name: str, tp: int) -> dict[str, Any]:
    """One family at one tensor-parallel size, in processes of its own."""
    family = FAMILIES[name]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="family-") as directory:
        try:
            made = _in_processes(context, 1, directory, "make", family, tp)
        except _Crash as crash:
            return {"outcome": "crashed", "why": f"making the model: {crash}"}
        del made
        try:
            found: dict[str, Any] = _in_processes(context, tp, directory, "probe", family, tp)
            return found
        except _Crash as crash:
            return {"outcome": "crashed", "why": str(crash)}


class _Crash(Exception):
    pass


def _in_processes(context: Any, size: int, directory: str, what: str, family: Family, tp: int) -> Any:
    """Rank 0's result. Raises _Crash with the first traceback."""
    from hybridengine.distributed.world import free_port

    port, ranks, pipes = free_port(), [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, size, port, directory, what, family, tp, sender))
        process.start()
        sender.close()
        ranks.append(process)
        pipes.append(receiver)
    results: dict[int, Any] = {}
    deadline = time.monotonic() + SECONDS
    try:
        while len(results) < size:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _Crash(f"still running after {SECONDS:.0f} s")
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    ok, results[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    ranks[rank].join(5)
                    raise _Crash(f"rank {rank} exited with code {ranks[rank].exitcode}") from None
                if not ok:
                    raise _Crash(results[rank])
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
    return results[0]


def _rank(
    rank: int, size: int, port: int, directory: str, what: str, family: Family, tp: int, pipe: Connection
) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    import torch

    from hybridengine.distributed.world import World

    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            path = Path(directory) / "model"
            value = make_model(path, family) if what == "make" else probe(World.from_env(), str(path), family, tp)
        payload = pickle.dumps((True, value))
    except BaseException:  # noqa: BLE001  reported by the parent
        payload = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(payload)
    pipe.close()
    sys.stderr.flush()
    os._exit(0)


# -- results ---------------------------------------------------------------------------------------


#: family -> tensor-parallel size -> outcome
Results = dict[str, dict[int, dict[str, Any]]]


def summarize(found: Results) -> dict[str, Any]:
    """Names by outcome: the worst of its tensor-parallel sizes; and the largest difference of those that ran."""
    order = ("right", "refused", "wrong", "crashed")
    summary: dict[str, Any] = {outcome: [] for outcome in order}
    summary["largest"] = {}
    for name, by_tp in found.items():
        worst = max((result["outcome"] for result in by_tp.values()), key=order.index)
        if {result["outcome"] for result in by_tp.values()} == {"right", "refused"}:
            worst = "right"  # this size only is refused, such as more ranks than KV heads allow
        summary[worst].append(name)
        ran = [result["largest"] for result in by_tp.values() if "largest" in result]
        if ran:
            summary["largest"][name] = float(f"{max(ran):.3g}")
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    """The return value is the exit status: 0 when no family is wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="families; default: all")
    parser.add_argument("--tp", type=int, nargs="*", default=[1, 2], help="tensor-parallel sizes")
    parser.add_argument("--json", type=Path, help="also write every result here")
    parser.add_argument("--write", type=Path, help="write the page with the table here")
    parser.add_argument("--merge", type=Path, nargs="*", help="take results that --json wrote, later ones first")
    given = parser.parse_args(arguments)
    if given.merge:
        return conclude(merged(given.merge), given.write)
    names = given.names or list(FAMILIES)
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name in names:
        found[name] = {}
        for tp in given.tp:
            begun = time.perf_counter()
            result = found[name][tp] = run_family(name, tp)
            seconds = time.perf_counter() - begun
            sides = " ".join(f"{side} {value:.1e}" for side, value in result.get("sides", {}).items())
            why = result.get("why", "").strip().splitlines() or [""]
            text = why[-1] if result["outcome"] == "crashed" else why[0]
            print(f"{name:26} tp {tp}  {result['outcome']:8} {seconds:5.1f} s  {sides}  {text[:300]}", flush=True)
            if given.json:
                given.json.write_text(json.dumps(found, indent=1))
    return conclude(found, given.write)


def merged(files: Sequence[Path]) -> Results:
    """Results of several runs; of a family and size that several have, the last file's. Families that are no more are
    left out."""
    found: Results = {name: {} for name in FAMILIES}
    for file in files:
        for name, by_tp in json.loads(file.read_text()).items():
            if name in found:
                found[name] |= {int(tp): result for tp, result in by_tp.items()}
    return {name: by_tp for name, by_tp in found.items() if by_tp}


def conclude(found: Results, page: Path | None) -> int:
    """Write the page, print the summary as the last line; the exit status."""
    summary = summarize(found)
    if page is not None:
        page.write_text(as_page(found))
    print(json.dumps(summary))
    return 0 if not summary["wrong"] and not summary["crashed"] else 1


def as_page(found: Results) -> str:
    """docs/families.md."""
    summary = summarize(found)
    lines = [PAGE.format(right=len(summary["right"]), refused=len(summary["refused"]), date=time.strftime("%Y-%m-%d"))]
    lines += ["| family | tensor parallel | packed | padded | transformers |", "| --- | --- | --- | --- | --- |"]
    for name in summary["right"]:
        for tp, result in sorted(found[name].items()):
            if "sides" in result:
                sides = [result["sides"].get(side) for side in ("packed", "padded", "transformers")]
                cells = ["padded instead" if side is None else f"{side:.1e}" for side in sides]
                lines.append(f"| {name} | {tp} | {' | '.join(cells)} |")
    lines += ["", "## Refused", "", "| family | why |", "| --- | --- |"]
    for name in [*summary["refused"], *summary["right"]]:
        why = next((r["why"] for r in found[name].values() if r["outcome"] == "refused"), None)
        if why is None:
            continue  # right at every size
        text = why.splitlines()[0].replace("|", "\\|")
        lines.append(f"| {name} | {text.partition(': ')[2] if text.startswith('model.path=') else text} |")
    for outcome in ("wrong", "crashed"):
        if summary[outcome]:
            lines += ["", f"## {outcome.capitalize()}", "", ", ".join(summary[outcome])]
    return "\n".join(lines) + "\n"


PAGE = """# Which model families run

Made by `make families` on {date}: vLLM 0.32 and transformers 5.19 on a machine with 2 cores (AMD EPYC) and no GPU, in
float32. Each family is a random model of a few layers from its transformers configuration; both engines of a run are
started, weights are synced, and {right} families agree. The columns are the largest |difference| between the
log-probability that the rollout engine reported for a token it sampled and the one that the trainer (packed, padded)
and plain transformers give it, over probes at the shortest and longest length and around sliding windows and the
original context of scaled rotary embeddings. {refused} are refused by validation, before anything starts. "Padded
instead": the family's attention can't keep packed sequences apart, and micro-batches are padded rows. A size that the
table does not have was not run.

`hybridengine doctor parity model.path=...` does the same with any model directory, and every run does it once after
its first weight sync (`parity.probe`, [engines.md](engines.md#parity)).
"""


if __name__ == "__main__":
    sys.exit(main())
