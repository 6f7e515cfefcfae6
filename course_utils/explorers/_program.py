"""Small programs that a learner types, such as `h = tanh(w * x); loss = sum(h ** 2)`: read, refused in a sentence, or run.

Nothing of what is typed reaches Python's own evaluation. The text is parsed, each node of the parsed tree is held
against a short list of what is allowed, and the same tree is then computed with torch, one operation at a time.
"""
import ast
import operator

import torch

FUNCTIONS = {
    "abs": torch.abs,
    "clone": torch.clone,
    "cos": torch.cos,
    "detach": torch.detach,
    "exp": torch.exp,
    "log": torch.log,
    "mean": torch.mean,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "sum": torch.sum,
    "tanh": torch.tanh,
}
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
}
SIGNS = {ast.USub: operator.neg, ast.UAdd: operator.pos}
LONGEST, LINES, NAME = 200, 6, 10  # characters of a program, its lines, characters of a name


def parse(words, leaves):
    """The program as a list of (name, parsed expression, source) in order; the last one is the loss.

    Lines are parted by semicolons or line breaks. Raises ValueError with a sentence for whatever is not allowed.
    """
    if len(words) > LONGEST:
        raise ValueError(f"there is room for {LONGEST} characters; these are {len(words)}")
    try:
        body = ast.parse(words.strip()).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("this is not a line of Python; write, for example, h = tanh(w * x); loss = sum(h)") from None
    if not body or len(body) > LINES:
        raise ValueError(f"write one to {LINES} lines, parted by semicolons; the last one is the loss")
    known, program = set(leaves), []
    for position, line in enumerate(body):
        name = _target(line, last=position == len(body) - 1)
        if name in known or name in FUNCTIONS:
            raise ValueError(f"{name} has a meaning already; take another name")
        if len(name) > NAME:
            raise ValueError(f"{name}: a name has at most {NAME} characters here")
        _allowed(line.value, known)
        known.add(name)
        program.append((name, line.value, ast.unparse(line.value)))
    return program


def _target(line, last):
    if isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name):
        return line.targets[0].id
    if isinstance(line, ast.Expr) and last:
        return "loss"
    raise ValueError(f"{_short(line)}: write name = expression; only the last line may do without a name")


def _allowed(node, known):
    """Raise ValueError, with a sentence, at the first part of an expression that is not on the list."""
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return
        case ast.Name(id=name):
            if name not in known:
                raise ValueError(f"{name} is not known here; there are {', '.join(sorted(known))}")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            _allowed(left, known)
            _allowed(right, known)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in SIGNS:
            _allowed(operand, known)
        case ast.Call():
            name, argument = _call(node)
            if name not in FUNCTIONS:
                raise ValueError(f"{name} is not offered here; there are {', '.join(FUNCTIONS)}")
            _allowed(argument, known)
        case _:
            raise ValueError(f"{_short(node)}: only names, numbers, + - * / ** @ and functions of one tensor work here")


def _call(node):
    """(name, argument) of f(x), torch.f(x) or x.f(); all three are the same here."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
            return name, argument
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), args=[argument], keywords=[]):
            return name, argument
        case ast.Call(func=ast.Attribute(value=argument, attr=name), args=[], keywords=[]):
            return name, argument
    raise ValueError(f"{_short(node)}: write f(x) or x.f(), with one tensor and no further argument")


def _short(node):
    words = ast.unparse(node)
    return words if len(words) <= 40 else words[:39] + "…"


def compute(node, names, watch=lambda result, operands: None):
    """The value of an allowed expression; `watch(result, operands)` is told of every tensor made, in order.

    Numbers are floats, so that a huge power overflows instead of taking for ever. What torch or Python refuses, it raises.
    """
    match node:
        case ast.Constant():
            return float(node.value)
        case ast.Name():
            return names[node.id]
        case ast.BinOp():
            function, parts = OPERATORS[type(node.op)], (node.left, node.right)
        case ast.UnaryOp():
            function, parts = SIGNS[type(node.op)], (node.operand,)
        case _:
            name, argument = _call(node)
            function, parts = FUNCTIONS[name], (argument,)
    operands = [compute(part, names, watch) for part in parts]
    if isinstance(node, ast.Call) and not isinstance(operands[0], torch.Tensor):
        raise ValueError(f"{_short(node)}: a function takes a tensor here, not a number")
    result = function(*operands)
    if isinstance(result, complex):
        raise ValueError(f"{_short(node)} is a complex number")
    if isinstance(result, torch.Tensor):
        watch(result, operands)
    return result
