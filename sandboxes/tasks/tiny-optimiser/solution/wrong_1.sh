#!/bin/bash
set -e
cat > /app/tiny/optimise.py <<'PY'
"""Passes over the code, repeated until nothing changes any more. Each turns a list of (op, argument) into another."""

from tiny.vm import BINARY, wrap

NEUTRAL = {("ADD", 0), ("SUB", 0), ("MUL", 1), ("DIV", 1)}
POWERS = {2**exponent: exponent for exponent in range(1, 31)}


def constants(out):
    return len(out) > 1 and out[-1][0] == out[-2][0] == "PUSH"


def fold(code):
    """Operations on constants are done here and now."""
    out = []
    for op, argument in code:
        if op in BINARY and constants(out) and not (op in ("DIV", "MOD") and out[-1][1] == 0):
            right, left = out.pop()[1], out.pop()[1]
            out.append(("PUSH", wrap(BINARY[op](left, right))))
        elif op == "NEG" and out and out[-1][0] == "PUSH":
            out.append(("PUSH", wrap(-out.pop()[1])))
        else:
            out.append((op, argument))
    return out


def simplify(code):
    """x + 0 and its like are x; multiplication by a power of two is a shift."""
    out = []
    for op, argument in code:
        constant = out[-1][1] if out and out[-1][0] == "PUSH" else None
        if constant is not None and (op, constant) in NEUTRAL:
            out.pop()
        elif op == "MUL" and constant in POWERS:
            out[-1] = ("SHL", POWERS[constant])
        else:
            out.append((op, argument))
    return out


def body_stores(code, label):
    """The cells that are stored to from here to the end of a loop."""
    for op, argument in code:
        if op == "STORE":
            yield argument
        if (op, argument) == ("JMP", label):
            return


def propagate(code):
    """A cell that is known to hold a constant is not loaded."""
    known, out, met = {}, [], set()
    for index, (op, argument) in enumerate(code):
        if op == "STORE":
            if out[-1][0] == "PUSH":
                known[argument] = out[-1][1]
            else:
                known.pop(argument, None)
        elif op in ("JMP", "JZ"):
            met.add(argument)
        elif op == "LABEL" and argument in met:  # paths meet: nothing is known
            known = {}
        elif op == "LABEL":  # the head of a loop: what its body changes is not known
            for cell in body_stores(code[index:], argument):
                known.pop(cell, None)
        elif op == "LOAD" and argument in known:
            op, argument = "PUSH", known[argument]
        out.append((op, argument))
    return out


def drop_dead_stores(code):
    """A store that is overwritten before anything loads the cell only takes its value off the stack."""
    out = list(code)
    for index, (op, cell) in enumerate(code):
        if op != "STORE":
            continue
        for later, argument in code[index + 1 :]:
            if later in ("LABEL", "JMP", "JZ") or (later, argument) == ("LOAD", cell):
                break
            if (later, argument) == ("STORE", cell):
                out[index] = ("POP", None)
                break
    return out


def drop_pushes(code):
    """What is pushed or loaded and then popped need not be."""
    out = []
    for op, argument in code:
        if op == "POP" and out and out[-1][0] in ("PUSH", "LOAD"):
            out.pop()
        else:
            out.append((op, argument))
    return out


def decide(code):
    """A jump on a constant is always or never taken."""
    out = []
    for op, argument in code:
        if op == "JZ" and out and out[-1][0] == "PUSH":
            if out.pop()[1] == 0:
                out.append(("JMP", argument))
        else:
            out.append((op, argument))
    return out


def drop_unreachable(code):
    """Nothing runs between a jump and the next label."""
    out, reached = [], True
    for op, argument in code:
        reached = reached or op == "LABEL"
        if reached:
            out.append((op, argument))
        if op == "JMP":
            reached = False
    return out


def drop_labels(code):
    """Labels that nothing jumps to stand in the way of the other passes; a jump to what follows does nothing."""
    used = {argument for op, argument in code if op in ("JMP", "JZ")}
    out = [(op, argument) for op, argument in code if op != "LABEL" or argument in used]
    return [
        (op, argument)
        for index, (op, argument) in enumerate(out)
        if not (op == "JMP" and out[index + 1 : index + 2] == [("LABEL", argument)])
    ]


PASSES = (fold, simplify, propagate, drop_dead_stores, drop_pushes, decide, drop_unreachable, drop_labels)


def optimise(code):
    for step in (drop_unreachable, drop_labels):
        code = step(code)
    return code
PY
