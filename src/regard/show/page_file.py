"""The HTML file of a page: one script and one style, allowed by their hashes, and data.

    write_html(meta, blobs)     meta as JSON, every blob in base64 in an element

Tokens come from whatever a model read: "<" is escaped in the JSON, and the content
security policy allows no other script.

Next: page.py
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from regard.show.script_bundle import join_modules, read_asset, read_body


def write_html(meta: dict[str, Any], blobs: Mapping[str, bytes]) -> bytes:
    """Return the HTML file."""
    script, style = join_modules("offline_page.js"), read_asset("map.css")
    policy = (
        f"default-src 'none'; script-src {hash_source(script)}; "
        f"style-src {hash_source(style)}; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )
    data = json.dumps(meta, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # no token can end the element
    held = (
        f'<script type="text/plain" id="{name}">{base64.b64encode(x).decode()}</script>'
        for name, x in blobs.items()
    )
    parts = [
        *write_head("regard", policy, style),
        '<body class="regard" data-view="wait">',
        read_body(),
        f'<script type="application/json" id="meta">{data}</script>',
        *held,
        f'<script type="module">{script}</script>',
        "</body>",
        "</html>",
    ]
    return "\n".join(parts).encode()


def write_head(title: str, policy: str, style: str) -> list[str]:
    """Return the lines before the body of a page."""
    return [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        '<link rel="icon" href="data:,">',
        f"<style>{style}</style>",
        "</head>",
    ]


def hash_source(text: str) -> str:
    """Return the CSP source that allows a script or style of the page."""
    return (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    )
