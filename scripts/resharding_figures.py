"""Everything in docs/resharding.md that is computed: the picture and the table, by the planner itself.

python scripts/resharding_figures.py          # print the table, write docs/resharding.svg
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from hybridengine.sync.plan.layouts import fsdp_shard_map
from hybridengine.sync.plan.naming import canonical_params, vllm_table_map
from hybridengine.sync.plan.nesting import nested_order, sharding_for
from hybridengine.sync.plan.plan import build_plan
from hybridengine.sync.plan.spec import ShardMap

RANKS = 8
QWEN25_7B = SimpleNamespace(
    architectures=["Qwen2ForCausalLM"],
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    tie_word_embeddings=False,
)
WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def table() -> str:
    """Bytes per rank and sync in bfloat16, GB = 10^9 bytes, at each tensor-parallel size."""
    lines = [
        "| FSDP-8 to | a rank needs | it holds of that | receives: rank order | nested order | nested, best dimensions "
        "| minimum | full gather | saved | copies per rank |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    params = canonical_params(QWEN25_7B)
    for tp in (1, 2, 4):
        choice = sharding_for(QWEN25_7B, world_size=RANKS, tp=tp)
        target = vllm_table_map(QWEN25_7B, tp=tp, world_size=RANKS)
        plan = build_plan(fsdp_shard_map(params, RANKS, order=choice.order, dims=choice.dims), target)
        summary = plan.summary()
        by_name = {candidate.name: candidate.per_rank for candidate in choice.candidates}
        plain = by_name["rank order, dimension 0"]
        amounts = [
            target.held_bytes(0), summary.local, plain, by_name.get("nested order, dimension 0", plain),
            choice.best.per_rank, summary.minimum, summary.gather,
        ]  # fmt: skip
        cells = [f"{amount / 1e9:.2f} GB" for amount in amounts] + [f"{summary.saved:.0%}", f"{len(plan.copies(0))}"]
        lines.append(f"| TP{tp} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture() -> str:
    """SVG: the rows of one weight on 8 ranks that serve in groups of 2, in rank order and nested."""
    params = {WEIGHT: canonical_params(QWEN25_7B)[WEIGHT]}
    served = vllm_table_map(QWEN25_7B, tp=2, world_size=RANKS)
    target = ShardMap(
        params, [[s for s in slices if s.param == WEIGHT] for slices in served.ranks], {WEIGHT: "bfloat16"}
    )
    rows, width, height, gap = params[WEIGHT].shape[0], 330, 17, 5
    parts = []
    for column, (title, order) in enumerate(
        (("rank order", tuple(range(RANKS))), ("nested order", nested_order(RANKS, 2)))
    ):
        source = fsdp_shard_map(params, RANKS, order=order)
        plan = build_plan(source, target)
        left = 60 + column * (width + 70)
        received = sum(plan.received_bytes(rank) for rank in range(RANKS)) / RANKS / 2
        share = received / params[WEIGHT].numel
        parts.append(f'<text x="{left}" y="18" class="title">{title}: on average {share:.1%} is received</text>')
        for rank in range(RANKS):
            top = 30 + rank * (height + gap)
            held, needed = source.ranks[rank][0], target.ranks[rank][0]

            def bar(kind: str, first: int, count: int, *, top: int = top, left: int = left) -> str:
                x, w = left + width * first / rows, width * count / rows
                return f'<rect class="{kind}" x="{x:.1f}" y="{top}" width="{w:.1f}" height="{height}"/>'

            inside = needed.offsets[0] <= held.offsets[0] < needed.offsets[0] + needed.sizes[0]
            parts += [
                f'<text x="{left - 8}" y="{top + 13}" class="rank">rank {rank}</text>',
                bar("all", 0, rows),
                bar("needed", needed.offsets[0], needed.sizes[0]),
                bar("kept" if inside else "useless", held.offsets[0], held.sizes[0]),
            ]
    bottom = 30 + RANKS * (height + gap) + 18
    legend = (("kept", "held after training and kept"), ("useless", "held, not needed here"),
              ("needed", "must be received"), ("all", "not needed"))  # fmt: skip
    for i, (kind, text) in enumerate(legend):
        x = 20 + i * 215
        parts.append(f'<rect class="{kind}" x="{x}" y="{bottom - 11}" width="14" height="12"/>')
        parts.append(f'<text x="{x + 20}" y="{bottom}">{text}</text>')
    style = (
        "text{font:12px sans-serif;fill:#333}.title{font-weight:bold}.rank{text-anchor:end}"
        ".all{fill:#eee}.needed{fill:#9ecae1}.kept{fill:#08519c}.useless{fill:#bdbdbd;stroke:#737373}"
    )
    size = f'width="{60 + 2 * width + 90}" height="{bottom + 12}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    print(table())
    Path(__file__).parents[1].joinpath("docs", "resharding.svg").write_text(picture())
