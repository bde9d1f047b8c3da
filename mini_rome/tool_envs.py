"""Retail and shop in the shape of TRL's `environment_factory`: their tools as methods, with the schemas TRL reads.

TRL parses a response by the tokenizer's template, which must be the one for JSON arguments:

    tokenizer.response_template = TOOL_RESPONSE_TEMPLATE  # of mini_rome.trace
    GRPOTrainer(..., processing_class=tokenizer, environment_factory=RetailToolEnv)
"""

from __future__ import annotations

from mini_rome.env import TRLEnv
from mini_rome.tools import dump
from mini_rome.trace import Call


class JSONToolEnv(TRLEnv):
    """What both share: the customer, and the end."""

    _calls_per_turn = 3  # in the families' own counting, a response makes up to three

    def say(self, text: str) -> str:
        """Say something to the customer.

        Args:
            text: What to say.

        Returns:
            What the customer answers.
        """
        return self._call("say", text=text)

    def submit(self) -> str:
        """Say that the task is complete."""
        return self._step(Call("submit"))

    def _call(self, tool: str, **arguments: str) -> str:
        return self._step(Call(tool, dump(arguments)))


class RetailToolEnv(JSONToolEnv):
    """The family retail."""

    def find_user(self, name: str) -> str:
        """Find the order of a customer.

        Args:
            name: The customer's name.

        Returns:
            The order's id.
        """
        return self._call("find_user", name=name)

    def get_order(self, id: str) -> str:
        """Look up an order.

        Args:
            id: The order's id.

        Returns:
            Its item, its state (open or sent) and whether there is a receipt.
        """
        return self._call("get_order", id=id)

    def change_item(self, item: str, to: str) -> str:
        """Exchange an item for the same one in another colour.

        Args:
            item: The item.
            to: The new colour.

        Returns:
            What was changed.
        """
        return self._call("change_item", item=item, to=to)

    def cancel(self, item: str) -> str:
        """Cancel an item.

        Args:
            item: The item.

        Returns:
            What was cancelled.
        """
        return self._call("cancel", item=item)

    def refund(self, item: str) -> str:
        """Pay an item back.

        Args:
            item: The item.

        Returns:
            What was refunded.
        """
        return self._call("refund", item=item)


class ShopToolEnv(JSONToolEnv):
    """The family shop."""

    def search(self, kind: str) -> str:
        """Find the products of a kind.

        Args:
            kind: The kind of product.

        Returns:
            The ids of the products.
        """
        return self._call("search", kind=kind)

    def view(self, id: str, size: str) -> str:
        """Look at a product in a size.

        Args:
            id: The product's id.
            size: The size.

        Returns:
            Its kind, and the id to add.
        """
        return self._call("view", id=id, size=size)

    def add(self, id: str) -> str:
        """Put a product into the cart.

        Args:
            id: The product's id.

        Returns:
            What was added.
        """
        return self._call("add", id=id)

    def remove(self, id: str) -> str:
        """Take a product out of the cart.

        Args:
            id: The product's id.

        Returns:
            What was removed.
        """
        return self._call("remove", id=id)

    def buy(self) -> str:
        """Buy what is in the cart.

        Returns:
            How many products were bought.
        """
        return self._call("buy")
