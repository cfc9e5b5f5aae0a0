"""Rename everything that a file defines, and reword its texts: what no edit may notice.

Next: ../test_mutate.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .locate import Token, read_every_token, rename_placeholders

JS_DEFINES = r"\b(?:const|let|var|function|class)\s+([A-Za-z_$][\w$]*)|(?m:^\s+(?:async )?#?([a-z]\w*)\([^()]*\) \{)"


def find_defined(text: str, language: str) -> set[tuple[str, str]]:
    """Return what a file defines: names as ("", name), methods and fields as (".", name)."""
    if language != ".py":
        found = re.findall(JS_DEFINES, text) if language == ".js" else []
        return {
            (space, x)
            for pair in found
            for space, x in zip(("", "."), pair, strict=True)
            if x
        }
    names: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            names |= {(".", x) for part in node.body for x in list_targets(part)}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add((".", node.attr))
        names |= {("", x) for x in list_targets(node)}
    return {(space, x) for space, x in names if not x.startswith("__") and x != "_"}


def list_targets(node: ast.AST) -> set[str]:
    """Return the names that a node gives a meaning to."""
    if isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler
    ):
        return {node.name} if node.name else set()
    if isinstance(node, ast.AnnAssign):
        return list_targets(node.target)
    if isinstance(node, ast.Assign):
        return {x for target in node.targets for x in list_targets(target)}
    if isinstance(node, ast.arg):
        return {node.arg}
    return (
        {node.id}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        else set()
    )


def rename_all(path: str, text: str) -> str:
    """Return a file with other names and other prose, and the same syntax."""
    language = Path(path).suffix
    defined = find_defined(text, language)
    return rename(text, defined, language)


def rename(text: str, defined: set[tuple[str, str]], language: str) -> str:
    """Return a text with the names given renamed."""
    made, at = "", 0
    for token in read_every_token(text, language):
        made += text[at : token.start] + rename_token(token, defined, language)
        at = token.end
    return made + text[at:]


def rename_token(token: Token, defined: set[tuple[str, str]], language: str) -> str:
    """Return a token under its new name; a text with spaces is reworded."""
    if token.kind == "name":
        known = ("." if token.space == "." else "", token.text) in defined
        return f"new_{token.text}" if known else token.text
    if token.kind != "text" or language != ".py":
        return token.text
    quote = re.match(r"([rbfuRBFU]*)(\"\"\"|\"|')", token.text)
    said = rename_placeholders(
        token.text, lambda *x: f"new_{x[1]}" if x in defined else x[1]
    )
    if quote and re.search(r"\w \w", said):
        said = said[: quote.end()] + "In other words: " + said[quote.end() :]
    return said
