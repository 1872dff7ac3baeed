# SPDX-License-Identifier: Apache-2.0
"""The look of the report: light and dark, colours that differ for everybody.

Seven colours after Okabe and Ito, whose lightness differs too, in two versions for the
two backgrounds; the MPI library's own collective has the colour of the text.
"""

from __future__ import annotations

__all__ = ["NATIVE_COLOUR", "NUM_COLOURS", "STYLE"]

_LIGHT = ("#0072b2", "#d55e00", "#00845f", "#b0528a", "#b07d00", "#3a9bd9", "#7a3e00")
_DARK = ("#58aef0", "#ff8b45", "#2fc79b", "#eb9fcb", "#f2b632", "#a5dcff", "#c9966b")
NUM_COLOURS = len(_LIGHT)
NATIVE_COLOUR = NUM_COLOURS


def _variables(colours: tuple[str, ...], base: str) -> str:
    named = "".join(f"--c{number}:{colour};" for number, colour in enumerate(colours))
    return f"{named}{base}"


_ON_LIGHT = _variables(
    _LIGHT,
    "--c7:#222a33;--bg:#fbfbfa;--card:#fff;--fg:#1b222a;--soft:#57616c;"
    "--rule:#dfe2e6;--grid:#e9ecef;--band:#0072b212;",
)
_ON_DARK = _variables(
    _DARK,
    "--c7:#eef1f4;--bg:#14181d;--card:#1b2027;--fg:#e8ebee;--soft:#a3adb8;"
    "--rule:#333b45;--grid:#2a3139;--band:#58aef01c;",
)
_CLASSES = "".join(
    f".c{number}{{--c:var(--c{number})}}" for number in range(NUM_COLOURS + 1)
)

STYLE = f"""
:root{{color-scheme:light dark;{_ON_LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{_ON_DARK}}}}}
{_CLASSES}
*{{box-sizing:border-box}}
body{{margin:0 auto;padding:28px 24px 60px;max-width:1480px;background:var(--bg);
color:var(--fg);font:15px/1.5 system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,
"DejaVu Sans",sans-serif}}
h1{{font-size:26px;line-height:1.25;margin:0 0 4px}}
h2{{font-size:20px;margin:44px 0 10px;padding-top:10px;
border-top:2px solid var(--rule)}}
h3{{font-size:16px;margin:0 0 2px}}
p{{margin:6px 0;max-width:80ch}}
.soft,figcaption,dt{{color:var(--soft)}}
a{{color:var(--c0)}}
code{{font:13px/1.5 ui-monospace,"SFMono-Regular",Menlo,Consolas,"DejaVu Sans Mono",
monospace;overflow-wrap:anywhere}}
.facts{{display:grid;grid-template-columns:repeat(auto-fit,minmax(330px,1fr));gap:16px;
margin:18px 0;align-items:start}}
.card,section.cell{{background:var(--card);border:1px solid var(--rule);
border-radius:8px;padding:14px 18px}}
section.cell{{margin:16px 0;scroll-margin-top:8px}}
dl{{display:grid;grid-template-columns:max-content 1fr;gap:2px 14px;margin:6px 0 0}}
dd{{margin:0;overflow-wrap:anywhere}}
.big{{font-size:24px;font-weight:600}}
.legend{{display:flex;flex-wrap:wrap;gap:4px 20px;margin:10px 0;padding:0;
list-style:none;font-size:13px}}
.legend li{{display:flex;align-items:center;gap:7px;white-space:nowrap}}
.charts{{display:grid;gap:6px 26px;
grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr))}}
.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;font-size:13px;margin:8px 0}}
th{{text-align:left;font-weight:600;color:var(--soft)}}
th,td{{padding:4px 16px 4px 0;border-bottom:1px solid var(--rule);vertical-align:top}}
td code{{white-space:nowrap}}
td.n{{white-space:nowrap;font-variant-numeric:tabular-nums}}
.glance td{{min-width:230px}}
.glance td,.glance th{{vertical-align:middle}}
svg{{display:block;width:100%;height:auto;overflow:visible}}
svg.mini{{width:260px;max-width:100%}}
svg.swatch{{width:30px;flex:none}}
svg text{{font-family:inherit;fill:var(--fg)}}
.title{{font-size:12.5px;font-weight:600}}
.tick{{font-size:10.5px;fill:var(--soft)!important}}
.pick{{font-size:10px}}
.grid{{stroke:var(--grid)}}
.axis{{stroke:var(--soft)}}
.band{{fill:var(--band)}}
.cross{{stroke:var(--soft);stroke-dasharray:2 3}}
.l{{fill:none;stroke:var(--c);stroke-width:1.2;stroke-linejoin:round}}
.l.bold{{stroke-width:2.4}}
.d1{{stroke-dasharray:6 3}}
.d2{{stroke-dasharray:2 2}}
.ci{{fill:none;stroke:var(--c);stroke-width:1}}
.m{{fill:var(--c);stroke:var(--card);stroke-width:.7}}
.m.hollow{{fill:var(--card);stroke:var(--c);stroke-width:1.3}}
.f{{fill:var(--c);fill-opacity:.2}}
.e{{fill:var(--c)}}
@media print{{section.cell{{break-inside:avoid}}}}
"""
