"""Retail desk (tool use, as in tau2-bench retail): customers' wishes, a policy, and tools over a database of orders.

A wish names an order or only its customer. The agent looks up the customer's order, the order's item and state, then
does what was asked where the policy allows it or says no, and hears the next wish. What is asked for is done on the
item, which only the order shows, so that step cannot be left out. The tools do not enforce the policy: a change of
what was sent, or a refund without receipt, goes through and can never be rewarded. A name that is not there is an
error and changes nothing. Half of the instances are in Chinese; in half of them all wishes are told at once.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from mini_rome.errors import ToolRefused
from mini_rome.families.base import COLOURS, NAMES, Family
from mini_rome.families.desk import (
    DATABASE,
    LANGUAGES,
    TWO_COLOURS,
    Database,
    absent,
    expect_state,
    next_words,
    tell,
    wrong_name,
)
from mini_rome.tools import SHOWN, call_body, dump
from mini_rome.types import Task, Tool

WORDS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "rules": "Serve the customer. Change or cancel only open orders, refund only with receipt, else say no.",
        "cancel": "cancel: {who}", "change": "change to '{to}': {who}", "refund": "refund: {who}",
        "order": "order '{name}'", "user": "user '{name}'",
        "last": "last, ", "done": "done", "no": "no", "bye": "bye",
    },
    "zh": {
        "rules": "服务顾客，open 才可改或取消，有 receipt 才可退款，否则说不。",
        "cancel": "取消：{who}", "change": "改成'{to}'：{who}", "refund": "退款：{who}",
        "order": "订单'{name}'", "user": "顾客'{name}'",
        "last": "最后，", "done": "好", "no": "不", "bye": "再见",
    },
}  # fmt: skip
GONE = ("cancelled", "refunded")  # in place of an item's colour


# The tools: pure functions of the database and arguments of text.


def find_user(database: Database, name: str) -> object:
    """The order of a customer."""
    if name not in database["users"]:
        raise ToolRefused(f"no user '{name[:SHOWN]}'")
    return {"order": database["users"][name]}


def get_order(database: Database, id: str) -> object:
    """Item, state (open or sent) and receipt (yes or no) of an order."""
    if id not in database["orders"]:
        raise ToolRefused(f"no order '{id[:SHOWN]}'")
    return database["orders"][id]


def change_item(database: Database, item: str, to: str) -> object:
    """Exchange an item for the same one in another colour."""
    _kept(database, item)
    if to not in COLOURS:
        raise ToolRefused(f"no color '{to[:SHOWN]}'")
    database["items"][item] = to
    return {"changed": item}


def cancel(database: Database, item: str) -> object:
    """Cancel an item."""
    _kept(database, item)
    database["items"][item] = "cancelled"
    return {"cancelled": item}


def refund(database: Database, item: str) -> object:
    """Pay an item back."""
    _kept(database, item)
    database["items"][item] = "refunded"
    return {"refunded": item}


def say(database: Database, text: str) -> object:
    """Answer the customer's wish; the customer goes on with the next one."""
    if text not in database["words"]:
        raise ToolRefused(f"say {' or '.join(database['words'])}")
    database["told"].append(text)
    return next_words(database)


def _kept(database: Database, item: str) -> None:
    """Refuse an item that is not there or not kept any more."""
    if item not in database["items"]:
        raise ToolRefused(f"no item '{item[:SHOWN]}'")
    if database["items"][item] in GONE:
        raise ToolRefused(f"{item} is {database['items'][item]}")


TOOLS: Mapping[str, Tool] = {
    "find_user": find_user, "get_order": get_order, "change_item": change_item, "cancel": cancel, "refund": refund,
    "say": say,
}  # fmt: skip


@dataclass
class Wish:
    """One wish: what is said, what the expert does, and how its item and the answer must be in the end."""

    text: str
    expert: list[str]
    order: dict[str, str]
    before: str
    after: str
    answer: str


def lengths(rng: random.Random, chunks: int) -> list[int]:
    """Chunks of each wish: 2 where it names its order, 3 where only its customer, and 1 for K = 1 alone."""
    if chunks == 1:
        return [1]
    by_user = rng.choice(range(chunks % 2, chunks // 3 + 1, 2))
    found = [3] * by_user + [2] * ((chunks - 3 * by_user) // 2)
    rng.shuffle(found)
    return found


def make_wish(rng: random.Random, words: Mapping[str, str], length: int, user: str, order: str, item: str) -> Wish:
    """A wish of `length` chunks for this order, half of the time one that the policy refuses."""
    kind = rng.choice(("cancel", "change", "refund"))
    before, to = rng.choice(TWO_COLOURS)
    record = {"item": item, "state": rng.choice(("open", "sent")), "receipt": rng.choice(("yes", "no"))}
    allowed = record["receipt"] == "yes" if kind == "refund" else record["state"] == "open"
    who = words["user"].format(name=user) if length == 3 else words["order"].format(name=order)
    answer = words["done" if allowed else "no"]
    expert = [call_body("say", text=answer)]
    if allowed:
        act = call_body("change_item", item=item, to=to) if kind == "change" else call_body(kind, item=item)
        expert[0] = f"{act}\n{expert[0]}"
    if length > 1:
        expert.insert(0, call_body("get_order", id=order))
    if length > 2:
        expert.insert(0, call_body("find_user", name=user))
    after = {"cancel": "cancelled", "change": to, "refund": "refunded"}[kind] if allowed else before
    return Wish(words[kind].format(who=who, to=to), expert, record, before, after, answer)


class Retail(Family):
    """See the module docstring."""

    name = "retail"
    domain = "tool-use"

    def build(self, rng: random.Random, chunks: int) -> Task:
        language, at_once = rng.choice(LANGUAGES), rng.random() < 0.5
        words, sizes = WORDS[language], lengths(rng, chunks)
        names = iter(rng.sample(NAMES, 3 * len(sizes)))
        triples = [(next(names), next(names), next(names)) for _ in sizes]  # customer, order, item
        wishes = [make_wish(rng, words, size, *triple) for size, triple in zip(sizes, triples, strict=True)]
        told, script = tell([w.text for w in wishes], [()] * len(wishes), words["last"], words["bye"], at_once)
        record = f"\n{dump(wishes[0].order)}" if chunks == 1 else ""  # there is no chunk left to look it up in
        database = {
            "users": {user: order for user, order, _ in triples},
            "orders": {order: wish.order for (_, order, _), wish in zip(triples, wishes, strict=True)},
            "items": {item: wish.before for (_, _, item), wish in zip(triples, wishes, strict=True)},
            "words": [words["done"], words["no"]],
            "told": [],
            "script": script,
        }
        after = {item: wish.after for (_, _, item), wish in zip(triples, wishes, strict=True)}
        return Task(
            name=self.name,
            family=self.name,
            domain=self.domain,
            instruction=f"{words['rules']}\n{told}{record}",
            files={DATABASE: dump(database)},
            expert=tuple(chunk for wish in wishes for chunk in wish.expert),
            check=partial(expect_state, {"items": after, "told": [wish.answer for wish in wishes]}),
            tools=TOOLS,
            database=DATABASE,
            language=language,
        )

    def mistake(self, task: Task, chunk: int, rng: random.Random) -> str:
        """The expert's call with a name that is not there."""
        return wrong_name(task.expert[chunk], absent(NAMES, task.files[DATABASE], rng), "get_order")
