"""Single edits of a function's syntax: an operator, a constant, an axis, a name.

    for name, fn in edit_syntax(exercise): ...

Each edit replaces one node of the tree of the reference solution. An edit that does not
compile is left out.

Next: behaviour.py
"""

import ast
import copy
import inspect
import re
import textwrap

import numpy as np

BINARY = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div, ast.Add),
    ast.Div: (ast.Mult, ast.FloorDiv),
    ast.FloorDiv: (ast.Div,),
    ast.Pow: (ast.Mult,),
    ast.MatMult: (ast.Mult,),
    ast.BitAnd: (ast.BitOr, ast.BitXor),
    ast.BitOr: (ast.BitAnd, ast.BitXor),
}
COMPARE = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
CALLS = {
    "max": ("min", "mean", "sum"),
    "sum": ("max", "mean", "prod"),
    "mean": ("sum", "max", "median"),
    "var": ("std",),
    "exp": ("exp2", "expm1", "abs"),
    "sqrt": ("abs", "square", "cbrt"),
    "sin": ("cos", "tan"),
    "cos": ("sin",),
    "tril": ("triu", "abs"),
    "tri": ("ones",),
    "argmax": ("argmin",),
    "logaddexp": ("logaddexp2", "maximum", "add"),
    "repeat": ("tile",),
    "maximum": ("minimum",),
}
INFINITE = ("-100.0", "-1e4", "-1e9", "0.0", "np.nan", "np.inf")


def edit_syntax(exercise):
    """Yield the name and the function of each edit of the reference solution."""
    source = textwrap.dedent(inspect.getsource(exercise.reference))
    tree = ast.parse(source)
    names = list_names(tree)
    known = set()
    for place, node in enumerate(ast.walk(tree)):
        for new in list_edits(node, names):
            edited = copy.deepcopy(tree)
            target = list(ast.walk(edited))[place]
            edited = ast.fix_missing_locations(Replace(target, new).visit(edited))
            text = ast.unparse(edited)
            endless = re.search(r"(\w+)\.append\(\1\)", text)  # a list in itself
            if endless or text in known or text == ast.unparse(tree):
                continue
            known.add(text)
            fn = build(text, exercise)
            if fn is not None:
                line = getattr(node, "lineno", 1)
                old = ast.unparse(node) if not isinstance(node, ast.arguments) else ""
                yield f"line {line}: {old} -> {ast.unparse(new)}"[:120], fn


class Replace(ast.NodeTransformer):
    """Put one node in the place of another."""

    def __init__(self, target, new):
        self.target, self.new = target, new

    def visit(self, node):
        return self.new if node is self.target else self.generic_visit(node)


def build(text, exercise):
    """Return the function of a source text in the namespace of an exercise."""
    space = dict(exercise.reference.__globals__)
    try:
        exec(compile(text, "<fault>", "exec"), space)
    except SyntaxError:
        return None
    return space["reference"]


def list_names(tree):
    """Return the arguments and the variables of a function."""
    found = [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    found += [node.id for node in stored if isinstance(node.ctx, ast.Store)]
    return list(dict.fromkeys(found))


def list_edits(node, names):
    """Return the nodes that may stand in the place of this one."""
    for kind, edits in EDITS.items():
        if isinstance(node, kind):
            return list(edits(node, names))
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr):
        return [ast.Pass()]
    return []


def edit_binary(node, _):
    for op in BINARY.get(type(node.op), ()):
        yield ast.BinOp(node.left, op(), node.right)
    yield from (node.left, node.right)
    yield ast.BinOp(node.right, node.op, node.left)


def edit_unary(node, _):
    yield node.operand
    if ast.unparse(node) == "-np.inf":
        yield from (ast.parse(x, mode="eval").body for x in INFINITE)


def edit_constant(node, _):
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int | float):
        for new in (value + 1, value - 1, 2 * value, 0, value * 1.001):
            yield ast.Constant(new)


def edit_compare(node, _):
    for op in COMPARE:
        yield ast.Compare(node.left, [op()], node.comparators)


def edit_call(node, _):
    func = node.func
    yield from edit_function(node)
    yield from (x for x in node.args if not isinstance(x, ast.GeneratorExp))
    for i in range(len(node.args) - 1):
        args = [*node.args]
        args[i], args[i + 1] = args[i + 1], args[i]
        yield ast.Call(func, args, node.keywords)
    for keyword in node.keywords:
        rest = [x for x in node.keywords if x is not keyword]
        yield ast.Call(func, node.args, rest)
        if keyword.arg == "axis":
            for axis in (0, 1, -1, -2, None):
                new = ast.keyword("axis", ast.Constant(axis))
                yield ast.Call(func, node.args, [*rest, new])


def edit_function(node):
    """Yield calls of other functions, and what a method was called of."""
    func = node.func
    if isinstance(func, ast.Attribute):
        owner = func.value.id if isinstance(func.value, ast.Name) else ""
        for name in CALLS.get(func.attr, ()):
            if owner == "np" or callable(getattr(np.ndarray, name, None)):
                new = ast.Attribute(func.value, name, ast.Load())
                yield ast.Call(new, node.args, node.keywords)
        if owner not in ("np", "math"):
            yield func.value
    elif isinstance(func, ast.Name):
        for name in CALLS.get(func.id, ()):
            yield ast.Call(ast.Name(name, ast.Load()), node.args, node.keywords)


def edit_slice(node, _):
    for side in ("lower", "upper"):
        old = getattr(node, side)
        other = {x: getattr(node, x) for x in ("lower", "upper", "step") if x != side}
        yield ast.Slice(**other, **{side: None})
        if old is None:
            yield ast.Slice(
                **other, **{side: ast.Constant(1 if side[0] == "l" else -1)}
            )
        else:
            for op in (ast.Add(), ast.Sub()):
                new = ast.BinOp(old, op, ast.Constant(1))
                yield ast.Slice(**other, **{side: new})


def edit_subscript(node, _):
    if isinstance(node.ctx, ast.Load):
        yield node.value
        if not isinstance(node.slice, ast.Slice | ast.Tuple):
            for op in (ast.Add(), ast.Sub()):
                new = ast.BinOp(node.slice, op, ast.Constant(1))
                yield ast.Subscript(node.value, new, ast.Load())


def edit_attribute(node, _):
    if node.attr == "T":
        yield node.value


def edit_name(node, names):
    if isinstance(node.ctx, ast.Load) and node.id in names:
        for name in names:
            yield ast.Name(name, ast.Load())


def edit_if(node, _):
    for test in (ast.Constant(True), ast.Constant(False)):
        yield ast.If(test, node.body, node.orelse)


def edit_tuple(node, _):
    if isinstance(node.ctx, ast.Load):
        for i in range(len(node.elts) - 1):
            elements = [*node.elts]
            elements[i], elements[i + 1] = elements[i + 1], elements[i]
            yield ast.Tuple(elements, ast.Load())


EDITS = {
    ast.BinOp: edit_binary,
    ast.UnaryOp: edit_unary,
    ast.Constant: edit_constant,
    ast.Compare: edit_compare,
    ast.Call: edit_call,
    ast.Slice: edit_slice,
    ast.Subscript: edit_subscript,
    ast.Attribute: edit_attribute,
    ast.Name: edit_name,
    ast.If: edit_if,
    ast.Tuple: edit_tuple,
}
