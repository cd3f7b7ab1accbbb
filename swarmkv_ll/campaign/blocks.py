"""A page as blocks, written as Markdown, and as one HTML file that needs nothing else. All text is taken as it is:
whatever it holds, it is shown and not obeyed."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..printable import one_line


@dataclass(frozen=True)
class Code:
    """Something to be typed, or a name as a program knows it."""

    text: str


@dataclass(frozen=True)
class Strong:
    """What the eye should find."""

    text: str


@dataclass(frozen=True)
class Verdict:
    """ "met", "missed", "not concluded", or nothing."""

    text: str


Part: TypeAlias = str | Code | Strong | Verdict
Text: TypeAlias = Part | Sequence[Part]


@dataclass(frozen=True)
class Heading:
    """Level 1 is the title, and level 2 is in the table of contents."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    text: Text


@dataclass(frozen=True)
class Bullets:
    items: Sequence[Text]


@dataclass(frozen=True)
class Command:
    """A line for a shell."""

    text: str


@dataclass(frozen=True)
class Table:
    """Columns whose name begins with a space hold texts; the others hold numbers."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Text]]


@dataclass(frozen=True)
class Image:
    """One of the pictures, `name` being its file's without the ending."""

    name: str
    title: str
    shows: str


@dataclass(frozen=True)
class Figure:
    """A headline: how much of its bound something reached (0 to 1, for the bar), and what was measured, bound, wanted."""

    title: str
    share: float | None
    big: str
    small: str
    verdicts: Sequence[tuple[str, Verdict]]


@dataclass(frozen=True)
class Figures:
    figures: Sequence[Figure]


Block: TypeAlias = Heading | Paragraph | Bullets | Command | Table | Image | Figures

_SIGNS = {"met": "✓ met", "missed": "✗ missed", "not concluded": "? not concluded"}


def _parts(text: Text) -> Sequence[Part]:
    return [text] if isinstance(text, str | Code | Strong | Verdict) else text


# ── Markdown ─────────────────────────────────────────────────────────────────────────────────────────


def markdown(blocks: Sequence[Block], folder: str) -> str:
    """As Markdown (GitHub's), with the pictures in `folder`, a path relative to the page."""
    return "\n\n".join(_block_as_markdown(block, folder) for block in blocks) + "\n"


def _block_as_markdown(block: Block, folder: str) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {_md(block.text)}"
    if isinstance(block, Paragraph):
        return _md(block.text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {_md(item)}" for item in block.items)
    if isinstance(block, Command):
        fence = _fence(block.text, 3)
        return f"{fence}sh\n{one_line(block.text, 4000)}\n{fence}"
    if isinstance(block, Image):
        return f"![{_md(block.title)}]({folder}/{block.name}.png)\n\n{_md(Strong(block.title))}. {_md(block.shows)}"
    if isinstance(block, Figures):
        head = (" figure", "share of the bound", " beside it", " target")
        rows = [
            (
                Strong(f.title),
                Strong(f.big),
                f.small,
                [p for i, (told, verdict) in enumerate(f.verdicts) for p in ("; " * bool(i), f"{told}: ", verdict)],
            )
            for f in block.figures
        ]
        return _table_as_markdown(head, rows)
    return f"{_md(block.caption)}:\n\n{_table_as_markdown(block.head, block.rows)}"


def _table_as_markdown(head: Sequence[str], rows: Sequence[Sequence[Text]]) -> str:
    lines = [[_md(name.strip(), cell=True) for name in head], ["---" if n.startswith(" ") else "--:" for n in head]]
    lines += [[_md(cell, cell=True) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _md(text: Text, *, cell: bool = False) -> str:
    found = ""
    for part in _parts(text):
        if isinstance(part, Code):
            body, fence = one_line(part.text, 2000), _fence(part.text, 1)
            body = f" {body} " if body[:1] == "`" or body[-1:] == "`" else body
            found += f"{fence}{body.replace('|', chr(92) + '|') if cell else body}{fence}" if body else ""
        elif isinstance(part, Strong):
            found += f"**{_md_plain(part.text)}**"
        else:
            found += _SIGNS.get(part.text, "") if isinstance(part, Verdict) else _md_plain(part)
    return re.sub(r"^(\d*)([-+=#.)])(?=\s|#|$)", r"\1\\\2", found.strip())


def _md_plain(text: str) -> str:
    """Without meaning for Markdown, except at the beginning of a line."""
    body = _edged(text)
    body = re.sub(r"[\\`*_\[\]<>|~&$]", r"\\\g<0>", body)
    return re.sub(r"(?i)\b(https?|ftp|www)([:.])", r"\1\\\2", body)  # no link that nobody made


def _fence(text: str, least: int) -> str:
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def _edged(text: str) -> str:
    """On one line, and printable, with the space at its ends by which it is parted from its neighbours."""
    return " " * text[:1].isspace() + one_line(text, 4000) + " " * (len(text) > 1 and text[-1:].isspace())


# ── HTML ─────────────────────────────────────────────────────────────────────────────────────────────

_CSS = """
:root { color-scheme: light dark; --ink: #20262d; --soft: #59636e; --line: #d9dee4; --page: #fff; --card: #f6f8fa;
  --good: #0b6e4f; --bad: #b3261e; --open: #8a5a00; --bar: #0072b2; --track: #dfe5ec; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --soft: #a1acb8; --line: #39424d; --page: #14181d;
  --card: #1d232a; --good: #58c99b; --bad: #ff8a80; --open: #f0b95a; --bar: #4aa3e0; --track: #333c47; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 62rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: .5rem 0 1rem; }
h2 { font-size: 1.4rem; margin: 3rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p, ul { margin: .6rem 0; max-width: 52rem; } li { margin: .3rem 0; } ul { padding-left: 1.2rem; }
nav { margin: 1.2rem 0; font-size: .95rem; } nav a { margin-right: 1rem; color: var(--bar); white-space: nowrap; }
code { font: .88em ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace; background: var(--card);
  padding: .1em .3em; border-radius: 4px; overflow-wrap: anywhere; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; overflow-x: auto; }
pre code { padding: 0; background: none; white-space: pre-wrap; }
.told { color: var(--soft); font-size: .92rem; margin: 1.2rem 0 .4rem; }
.scroll { overflow-x: auto; margin-bottom: 1.2rem; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .55rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; } thead th { background: var(--card); font-weight: 600; vertical-align: bottom; }
.text { text-align: left; } td:not(.text) { white-space: nowrap; } td.text { min-width: 5rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: .9rem; margin: 1.4rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .9rem 1rem;
  break-inside: avoid; }
.card h3 { margin: 0; font-size: .95rem; } .big { font-size: 2rem; font-weight: 700; line-height: 1.25; }
.big small { font-size: .85rem; font-weight: 400; color: var(--soft); } .card p { margin: .25rem 0 0; font-size: .9rem; }
.bar { height: .5rem; background: var(--track); border-radius: 4px; overflow: hidden; margin: .35rem 0 .5rem; }
.bar i { display: block; height: 100%; background: var(--bar); }
.met, .missed, .open { font-weight: 600; white-space: nowrap; }
.met { color: var(--good); } .missed { color: var(--bad); } .open { color: var(--open); }
figure { margin: 1.4rem 0; break-inside: avoid; }
figure img { display: block; width: 100%; height: auto; background: #fff; } figure .scroll { margin: 0; }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .5rem; max-width: 52rem; }
@media (max-width: 42rem) { td.text { min-width: 9rem; } figure img { width: 40rem; } }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --line: #bbb; --page: #fff; --card: #f4f4f4;
  --good: #0b6e4f; --bad: #b3261e; --open: #8a5a00; --bar: #0072b2; --track: #ddd; }
  body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; } h2, h3, .told { break-after: avoid; }
  .scroll { overflow: visible; } table { font-size: 8pt; } td:not(.text) { white-space: normal; } tr { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""What a browser may load for the page: nothing but what is in it."""


def page(title: str, blocks: Sequence[Block], svgs: Mapping[str, bytes]) -> str:
    """As one HTML file, with the pictures in it."""
    headings = [block for block in blocks if isinstance(block, Heading) and block.level == 2]
    anchors = {id(block): f"part-{i}" for i, block in enumerate(headings, start=1)}
    links = "\n".join(f'<a href="#{anchors[id(block)]}">{_escaped(block.text)}</a>' for block in headings)
    body = []
    for block in blocks:
        body.append(_block_as_html(block, anchors.get(id(block)), svgs))
        if headings and block is blocks[0]:  # the title
            body.append(f'<nav aria-label="Contents">\n{links}\n</nav>')
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_escaped(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>",
            *body,
            "</main>\n</body>\n</html>\n",
        ]
    )


def _block_as_html(block: Block, anchor: str | None, svgs: Mapping[str, bytes]) -> str:
    if isinstance(block, Heading):
        at = f' id="{anchor}"' if anchor else ""
        return f"<h{block.level}{at}>{_escaped(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        return f"<p>{_html(block.text)}</p>"
    if isinstance(block, Bullets):
        return "<ul>\n" + "\n".join(f"<li>{_html(item)}</li>" for item in block.items) + "\n</ul>"
    if isinstance(block, Command):
        return f"<pre><code>{_escaped(block.text)}</code></pre>"
    if isinstance(block, Image):
        data = base64.b64encode(svgs[block.name]).decode()
        alt = _escaped(f"{block.title}. {block.shows}")
        caption = f"<figcaption>{_escaped(block.shows)}</figcaption>"
        image = f'<img src="data:image/svg+xml;base64,{data}" alt="{alt}">'
        return f'<figure><div class="scroll" tabindex="0">{image}</div>{caption}</figure>'
    if isinstance(block, Figures):
        return '<div class="cards">\n' + "\n".join(map(_figure_as_html, block.figures)) + "\n</div>"
    classes = [' class="text"' if name.startswith(" ") else "" for name in block.head]
    thead = "".join(f'<th scope="col"{c}>{_escaped(n)}</th>' for n, c in zip(block.head, classes, strict=True))
    rows = [
        "<tr>" + "".join(f"<td{c}>{_html(cell)}</td>" for cell, c in zip(row, classes, strict=True)) + "</tr>"
        for row in block.rows
    ]
    caption = _escaped(block.caption)
    head = f"<thead><tr>{thead}</tr></thead>\n" if any(name.strip() for name in block.head) else ""
    return (
        f'<p class="told">{caption}:</p>\n<div class="scroll" role="region" tabindex="0" aria-label="{caption}">\n'
        f"<table>\n{head}<tbody>\n" + "\n".join(rows) + "\n</tbody>\n</table>\n</div>"
    )


def _figure_as_html(figure: Figure) -> str:
    bar = ""
    if figure.share is not None:
        wide = 100 * min(1.0, max(0.0, figure.share))
        bar = f'<div class="bar" role="img" aria-label="{_escaped(figure.big)} of the bound"><i style="width: {wide:.1f}%"></i></div>\n'
    told = "".join(f"<p>{_escaped(text)}: {_html(verdict)}</p>" for text, verdict in figure.verdicts)
    return (
        f'<div class="card"><h3>{_escaped(figure.title)}</h3>\n<div class="big">{_escaped(figure.big)} '
        f"<small>of the bound</small></div>\n{bar}<p>{_escaped(figure.small)}</p>\n{told}</div>"
    )


def _html(text: Text) -> str:
    found = ""
    for part in _parts(text):
        if isinstance(part, Code):
            found += f"<code>{_escaped(part.text)}</code>"
        elif isinstance(part, Strong):
            found += f"<strong>{_escaped(part.text)}</strong>"
        elif isinstance(part, Verdict):
            kind = part.text if part.text in ("met", "missed") else "open"
            found += f'<span class="{kind}">{_SIGNS[part.text]}</span>' if part.text in _SIGNS else ""
        else:
            found += _kept_together(html.escape(_edged(part)))
    return found


def _escaped(text: str) -> str:
    return _kept_together(html.escape(one_line(text, 4000)))


def _kept_together(text: str) -> str:
    """Numbers on one line with their units."""
    return re.sub(r"(?<=\d) (?=(?:×|%|[mµ]?s|[kMG]?B|[kMG]B/s|tok/s)(?!\w))", "&nbsp;", text)
