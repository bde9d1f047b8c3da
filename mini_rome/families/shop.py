"""Web shop (general agent): a customer's wishes are met from a catalogue, put into a cart and bought at the end.

A wish is one of: take a product; swap one in the cart for another; take a product in a given size; a kind of product
to be searched for, in a given size, which some customers only tell when asked. Each size of a product has a name of
its own, which shows when the product is viewed in that size. One viewed in the wrong size can be put into the cart,
and removed until it is bought; what is bought stays bought. A name that is not there is an error and changes nothing.
Half of the instances are in Chinese; in half of them all wishes are told at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mini_rome.errors import ToolRefused
from mini_rome.families.base import NAMES, Family
from mini_rome.families.desk import (
    DATABASE,
    LANGUAGES,
    Database,
    absent,
    expect_state,
    next_words,
    tell,
    wrong_name,
)
from mini_rome.tools import SHOWN, call_body, dump
from mini_rome.types import Task, Tool

KINDS = tuple("bag bowl chair cup lamp pen rug table".split())
SIZES = ("small", "large")

WORDS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "rules": "Fill the cart as the customer wants, then buy.",
        "take": "take '{a}'", "swap": "swap '{a}' for '{b}'", "pick": "take '{a}', {size}",
        "find": "find '{kind}', {size}", "ask": "find '{kind}'", "size": "size '{value}'",
        "last": "last, ", "next": "next", "which": "which", "bye": "bye",
    },
    "zh": {
        "rules": "按顾客说的选购，最后付款。",
        "take": "要'{a}'", "swap": "把'{a}'换成'{b}'", "pick": "要'{a}'，{size}",
        "find": "找'{kind}'，{size}", "ask": "找'{kind}'", "size": "尺寸'{value}'",
        "last": "最后，", "next": "还有", "which": "哪种", "bye": "再见",
    },
}  # fmt: skip
LENGTHS = {"take": 1, "swap": 1, "pick": 2, "find": 3, "ask": 4}


# The tools: pure functions of the database and arguments of text.


def search(database: Database, kind: str) -> object:
    """The products of a kind, without those that are one of their sizes."""
    found = [name for name, product in database["goods"].items() if product.get("kind") == kind]
    if not found:
        raise ToolRefused(f"no kind '{kind[:SHOWN]}'")
    return {"found": found}


def view(database: Database, id: str, size: str) -> object:
    """What a product is in a size: its kind, and the id to add."""
    product = _product(database, id)
    if size not in product.get("sizes", {}):
        raise ToolRefused(f"no size '{size[:SHOWN]}'")
    return {"kind": product["kind"], "id": product["sizes"][size]}


def add(database: Database, id: str) -> object:
    """Put a product into the cart."""
    if "sizes" in _product(database, id):
        raise ToolRefused(f"{id} has sizes")
    if id in database["cart"]:
        raise ToolRefused(f"{id} is in the cart")
    database["cart"].append(id)
    return {"added": id}


def remove(database: Database, id: str) -> object:
    """Take a product out of the cart."""
    if id not in database["cart"]:
        raise ToolRefused(f"no '{id[:SHOWN]}' in the cart")
    database["cart"].remove(id)
    return {"removed": id}


def buy(database: Database) -> object:
    """Buy what is in the cart. It cannot be given back."""
    if not database["cart"]:
        raise ToolRefused("the cart is empty")
    count = len(database["cart"])
    database["bought"] = sorted(database["bought"] + database["cart"])
    database["cart"] = []
    return {"bought": count}


def say(database: Database, text: str) -> object:
    """Ask the customer, who goes on whatever is asked."""
    return next_words(database)


def _product(database: Database, id: str) -> dict[str, Any]:
    if id not in database["goods"]:
        raise ToolRefused(f"no product '{id[:SHOWN]}'")
    return database["goods"][id]


TOOLS: Mapping[str, Tool] = {"search": search, "view": view, "add": add, "remove": remove, "buy": buy, "say": say}


@dataclass
class Plan:
    """An instance in the making: the catalogue, the cart the expert fills, and what both sides say and do."""

    words: Mapping[str, str]
    names: Iterator[str]
    kinds: Iterator[str]
    common: str  # the kind of all products that are not searched for
    goods: dict[str, dict[str, Any]] = field(default_factory=dict)
    cart: list[str] = field(default_factory=list)
    wishes: list[str] = field(default_factory=list)
    replies: list[Sequence[str]] = field(default_factory=list)
    expert: list[list[str]] = field(default_factory=list)  # the calls of each chunk; the cart's end is added later

    def wish(self, rng: random.Random, form: str) -> None:
        """One more wish of this form."""
        if form in ("take", "swap"):
            self._by_name(rng, form)
        else:
            self._by_size(rng, form)

    def _by_name(self, rng: random.Random, form: str) -> None:
        product = next(self.names)
        self.goods[product] = {"kind": self.common}
        if form == "take":
            self._say(self.words["take"].format(a=product))
            self.expert.append([call_body("add", id=product)])
        else:
            old = rng.choice(self.cart)
            self.cart.remove(old)
            self._say(self.words["swap"].format(a=old, b=product))
            self.expert.append([call_body("remove", id=old), call_body("add", id=product)])
        self.cart.append(product)

    def _by_size(self, rng: random.Random, form: str) -> None:
        """A product in a size: by name (pick), or of a kind (find), the size told only when asked for (ask)."""
        kind = self.common if form == "pick" else next(self.kinds)
        product, sizes = next(self.names), {each: next(self.names) for each in SIZES}
        self.goods |= {product: {"kind": kind, "sizes": sizes}, **{name: {} for name in sizes.values()}}
        size = rng.choice(SIZES)
        given = {"a": product, "kind": kind, "size": self.words["size"].format(value=size)}
        answer = [self.words["find"].format(**given)] if form == "ask" else []
        self._say(self.words[form].format(**given), answer)
        if form != "pick":
            self.expert.append([call_body("search", kind=kind)])
        if form == "ask":
            self.expert.append([call_body("say", text=self.words["which"])])
        self.expert += [[call_body("view", id=product, size=size)], [call_body("add", id=sizes[size])]]
        self.cart.append(sizes[size])

    def _say(self, text: str, answers: Sequence[str] = ()) -> None:
        self.wishes.append(text)
        self.replies.append(answers)
        if self.expert:
            self.expert[-1].append(call_body("say", text=self.words["next"]))


def forms(rng: random.Random, chunks: int, at_once: bool) -> list[str]:
    """The forms of the wishes, of `chunks` chunks together; those that say little are rarer."""
    found: list[str] = []
    while chunks:
        small = ["take", "swap"] if found else ["take"]
        large = [form for form in ("pick", "find", "ask")[: 2 if at_once else 3] if LENGTHS[form] <= chunks]
        found.append(rng.choice(large if large and rng.random() < 0.8 else small))
        chunks -= LENGTHS[found[-1]]
    return found


class Shop(Family):
    """See the module docstring."""

    name = "shop"
    domain = "general-agent"

    def build(self, rng: random.Random, chunks: int) -> Task:
        language, at_once = rng.choice(LANGUAGES), rng.random() < 0.5
        words = WORDS[language]
        viewed = chunks == 1  # there is no chunk left to view the product: the instruction shows it in its size
        wanted = ["pick"] if viewed else forms(rng, chunks, at_once)
        common, *kinds = rng.sample(KINDS, len(KINDS))
        plan = Plan(words, iter(rng.sample(NAMES, 3 * len(wanted))), iter(kinds), common)
        for form in wanted:
            plan.wish(rng, form)
        record = f"\n{dump({'kind': common, 'id': plan.cart[0]})}" if viewed else ""
        plan.expert[-1].append(call_body("buy"))
        told, script = tell(plan.wishes, plan.replies, words["last"], words["bye"], at_once)
        database = {"goods": plan.goods, "cart": [], "bought": [], "script": script}
        return Task(
            name=self.name,
            family=self.name,
            domain=self.domain,
            instruction=f"{words['rules']}\n{told}{record}",
            files={DATABASE: dump(database)},
            expert=tuple("\n".join(calls) for calls in plan.expert[viewed:]),
            check=partial(expect_state, {"bought": sorted(plan.cart)}),
            tools=TOOLS,
            database=DATABASE,
            language=language,
        )

    def mistake(self, task: Task, chunk: int, rng: random.Random) -> str:
        """The expert's call with a name that is not there."""
        return wrong_name(task.expert[chunk], absent(NAMES, task.files[DATABASE], rng), "add")
