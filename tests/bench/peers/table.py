"""The results as a Markdown page and a plot in SVG."""

from collections.abc import Sequence
from html import escape
from typing import Any

NOTE = (
    "vLLM's CPU path for LoRA gathers each token's adapter weights in plain torch: what is shown here of it says "
    "nothing about its GPU kernels. It answers base rows wrongly when they share a batch with adapters, so its batches "
    "never mix them; those of `ours` with base rows beside adapters are compared with PEFT's. With adapters vLLM turns "
    "its compilation off on CPU. Prefix caches are off everywhere, since the same prompts come again. Over HTTP `ours` "
    "has its adapters loaded at the base's points too."
)

COLUMNS = (
    ("system", "system"),
    ("batch", "batch"),
    ("adapters", "adapters"),
    ("base rows", "base_rows"),
    ("prompt", "prompt_tokens"),
    ("decode tok/s", "decode_tok_s"),
    ("all rows decoding", "together_tok_s"),
    ("prefill tok/s", "prefill_tok_s"),
    ("wall s", "wall_s"),
)
HTTP_COLUMNS = (
    *COLUMNS[:3],
    ("beside", "against"),
    ("output tok/s", "output_tok_s"),
    *(column for column in COLUMNS[5:] if column[1] != "together_tok_s"),
)

BAR, WIDTH, LEFT = 16, 900, 360
COLOURS = ("#0b6e4f", "#6fb98f", "#c0392b", "#e59866", "#7d3c98", "#5d6d7e", "#aab7b8", "#2e86c1")


def markdown(lines: Sequence[dict[str, Any]], about: str) -> str:
    """Tables of what was measured, in-process and over HTTP, with what must be said beside them."""
    offline, http = _measured(lines)
    versions = [
        f"- {line['system']}: " + ", ".join(f"{package} {version}" for package, version in line["versions"].items())
        for line in lines
        if "versions" in line
    ]
    parts = [
        "# Peers, side by side",
        about,
        *(["\n".join(versions)] if versions else []),
        NOTE,
        _table(offline, COLUMNS),
    ]
    parts += ["## Over HTTP", _table(http, HTTP_COLUMNS)] if http else []
    failed = [f"- {line['system']}: {line['error']}" for line in lines if "error" in line]
    parts += ["## Not timed", "\n".join(failed)] if failed else []
    return "\n\n".join(parts) + "\n"


def _measured(lines: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    timed = [line for line in lines if "wall_s" in line and "beside" not in line]
    return [line for line in timed if "transport" not in line], [line for line in timed if "transport" in line]


def _table(lines: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str]]) -> str:
    rows = [[title for title, _ in columns], ["---"] * len(columns)]
    rows += [[str(line[key]) for _, key in columns] for line in lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def plot(lines: Sequence[dict[str, Any]]) -> str:
    """Bars of decode rates in-process, and of output rates over HTTP, one group for each batch."""
    offline, http = _measured(lines)
    groups: dict[str, list[tuple[str, float]]] = {}
    for line in offline:
        mixed = f" and {line['base_rows']} base rows" if line["base_rows"] else ""
        title = f"decode, batch {line['batch']}, {line['adapters']} adapters{mixed}, prompts of {line['prompt_tokens']}"
        groups.setdefault(title, []).append((line["system"], line["decode_tok_s"] or 0.0))
    for line in http:
        title = f"HTTP output, {line['batch']} at once, {line['adapters']} adapters, beside {line['against']}"
        groups.setdefault(title, []).append((line["system"], line["output_tok_s"]))
    names = list(dict.fromkeys(name for bars in groups.values() for name, _ in bars))
    shapes: list[str] = []
    y = BAR
    for title, bars in groups.items():
        y += 2 * BAR
        shapes.append(_text(8, y, f"{title}: tokens per second", "start", bold=True))
        longest = max(rate for _, rate in bars) or 1.0
        for name, rate in bars:
            y += BAR
            length = (WIDTH - LEFT - 80) * rate / longest
            colour = COLOURS[names.index(name) % len(COLOURS)]
            shapes.append(
                f'<rect x="{LEFT}" y="{y - BAR + 4}" width="{length:.1f}" height="{BAR - 3}" fill="{colour}"/>'
            )
            shapes += [_text(LEFT - 6, y, name, "end"), _text(LEFT + length + 6, y, f"{rate:g}", "start")]
    size = f'width="{WIDTH}" height="{y + BAR}"'
    style = 'font-family="sans-serif" font-size="12"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', background, *shapes, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
