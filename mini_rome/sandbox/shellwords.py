"""What a shell would run, read from command text: enough of the grammar to tell `ssh -R` from `echo "ssh -R"`.

Folds quotes, backslashes, `$'..'`, known variables, `${IFS}`, `{a,b}` words and one level of base64, looks inside
`$(..)`, `sh -c`, `eval`, here-documents and text piped into a shell. Covered: what the violation set holds.
Not covered: arithmetic, globs, functions called later, anything computed by another program. Not in the paper.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ash", "ksh"})
KEYWORDS = frozenset("{ } ! if then else elif fi while until do done case esac time coproc function".split())
MAX_DEPTH = 4  # sh -c "sh -c '...'" and so on; deeper text is left alone
MAX_TEXT = 60_000  # characters looked at: of a longer command its head and its tail, half each

_OPERATORS = re.compile(r"&&|\|\||;;|\|&|&>>|&>|<<<|<<-|<<|>>|>&|<&|<>|>\||[|;&<>()\n]")
_REDIRECTS = frozenset({"&>>", "&>", "<<<", "<<-", "<<", ">>", ">&", "<&", "<>", ">|", "<", ">"})
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_]\w*)(?::?[-=](?P<default>[^}]*))?\}|(?P<bare>[A-Za-z_]\w*)"
                       r"|\{?[@*#?!$\d-]\}?)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PLAIN = re.compile(r"[^\s\\'\"$`|;&<>()#]+")
_PLAIN_QUOTED = re.compile(r"[^\\\"$`]+")
_BASE64 = re.compile(r"[A-Za-z0-9+/]{12,}={0,2}")


@dataclass
class Command:
    """One simple command after folding: its words, its redirections as (operator, target), and a here-document."""

    argv: list[str] = field(default_factory=list)
    redirects: list[tuple[str, str]] = field(default_factory=list)
    stdin: str = ""

    @property
    def text(self) -> str:
        """The folded command on one line, as evidence."""
        return " ".join([*self.argv, *(f"{operator}{target}" for operator, target in self.redirects)])


Pipeline = list[Command]


def decode_base64(text: str) -> list[str]:
    """The printable texts hidden in `text` as base64, one level.

    >>> decode_base64("echo c3NoIC1SIDI6YjoyIGg= | base64 -d")
    ['ssh -R 2:b:2 h']
    """
    found = []
    for match in _BASE64.findall(text):
        try:
            plain = base64.b64decode(match + "=" * (-len(match) % 4), validate=True).decode("utf-8")
        except (binascii.Error, UnicodeDecodeError):
            continue
        if all(char.isprintable() or char in "\n\t" for char in plain):
            found.append(plain)
    return found


def clip(text: str) -> str:
    """At most MAX_TEXT characters: the head and the tail of longer text."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n{text[-MAX_TEXT // 2 :]}"


def pipelines(text: str, depth: int = 0) -> list[Pipeline]:
    """All pipelines that `text` would run, nested ones after the one that holds them.

    >>> [[c.argv for c in p] for p in pipelines('"s""sh" -R 1 h | cat')]
    [[['ssh', '-R', '1', 'h'], ['cat']]]
    """
    if depth >= MAX_DEPTH:
        return []
    reader = _Reader(clip(text), depth)
    reader.read()
    found = list(reader.nested)
    for pipeline in reader.found:
        found.append(pipeline)
        for inner in _inner_texts(pipeline):
            found += pipelines(inner, depth + 1)
    return found


def unwrap(argv: list[str]) -> list[str]:
    """The words from the program that really runs: assignments and wrappers such as env, nohup, timeout removed."""
    words = list(argv)
    while words:
        head = words[0].rsplit("/", 1)[-1]
        if _ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        elif head in _WRAPPERS and words[1:2] not in (["-v"], ["-V"]):  # `command -v x` only asks where x is
            words = _skip_options(words[1:], _WRAPPERS[head])
            if head == "timeout":
                words = words[1:]
        else:
            return words
    return words


_WRAPPERS = {  # wrapper -> its options that take a value
    "env": "uCS", "nohup": "", "setsid": "", "nice": "n", "ionice": "cn", "timeout": "sk", "exec": "a", "command": "",
    "builtin": "", "stdbuf": "ioe", "xargs": "nIPLds", "busybox": "", "watch": "n", "time": "fo", "proxychains": "f",
}


def _skip_options(words: list[str], valued: str) -> list[str]:
    while words and words[0].startswith("-") and len(words[0]) > 1:
        takes_value = len(words[0]) == 2 and words[0][1] in valued
        words = words[2 if takes_value else 1 :]
    return words


def _inner_texts(pipeline: Pipeline) -> list[str]:
    """Shell text that a pipeline hands to a shell: `sh -c`, `eval`, a here-document, or `echo .. | sh`."""
    texts: list[str] = []
    carried = ""
    for command in pipeline:
        words = unwrap(command.argv)
        name = words[0].rsplit("/", 1)[-1] if words else ""
        if name in SHELLS:
            flag = next((i for i, word in enumerate(words[1:], 1) if re.fullmatch(r"-[a-z]*c", word)), 0)
            texts += words[flag + 1 : flag + 2] if flag else [command.stdin or carried]
        elif name == "eval":
            texts.append(" ".join(words[1:]))
        elif name == "find" and "-exec" in words:
            texts.append(" ".join(words[words.index("-exec") + 1 :]))
        carried = _printed(words, carried)
    return [text for text in texts if text.strip()]


def _printed(words: list[str], before: str) -> str:
    """What a command writes, where that can be known: echo and printf their words, base64 -d the decoded text."""
    name = words[0].rsplit("/", 1)[-1] if words else ""
    if name in ("echo", "printf"):
        return " ".join(word for word in words[1:] if not re.fullmatch(r"-[neE]+", word))
    if name in ("base64", "openssl") and any(word in ("-d", "-D", "--decode", "-di") for word in words):
        return "\n".join(decode_base64(before))
    return before if name in ("cat", "tee") and len(words) == 1 else ""


class _Reader:
    """A one-pass shell reader: words into commands, commands into pipelines."""

    def __init__(self, text: str, depth: int) -> None:
        self.text, self.at, self.depth = text, 0, depth
        self.variables = {"IFS": " ", "HOME": "~"}
        self.found: list[Pipeline] = []
        self.nested: list[Pipeline] = []
        self.pipeline: Pipeline = []
        self.command = Command()
        self.word: str | None = None
        self.quoted, self.redirect = False, ""
        self.documents: list[tuple[str, Command]] = []

    def read(self) -> None:
        """Consume the whole text."""
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "#" and self.word is None:
                self.at = self._find("\n", self.at)
            elif char in " \t":
                self._end_word()
                self.at += 1
            elif operator := _OPERATORS.match(self.text, self.at):
                self._operator(operator.group())
            else:
                self._piece(char)
        self._end_pipeline()

    def _find(self, char: str, start: int) -> int:
        """Where `char` is from `start` on; the text's end when it is nowhere."""
        end = self.text.find(char, start)
        return len(self.text) if end < 0 else end

    def _piece(self, char: str) -> None:
        """One piece of a word: quoted text, an expansion, a substitution or a plain character."""
        if char == "\\":
            self._add("" if self.text[self.at + 1 : self.at + 2] == "\n" else self.text[self.at + 1 : self.at + 2], 2)
        elif char == "'":
            self._single(self.at + 1)
        elif char == '"':
            self._double()
        elif self.text.startswith("$'", self.at):
            self._ansi()
        elif char in "$`":
            self._dollar(quoted=False)
        else:
            plain = _PLAIN.match(self.text, self.at)
            self._add(plain.group() if plain else char, len(plain.group()) if plain else 1)

    def _add(self, text: str, consumed: int) -> None:
        self.word = (self.word or "") + text
        self.at += consumed

    def _single(self, start: int) -> None:
        end = self._find("'", start)
        self.quoted = True
        self._add(self.text[start:end], 0)
        self.at = end + 1

    def _ansi(self) -> None:
        match = re.compile(r"\$'((?:[^'\\]|\\.)*)'?", re.DOTALL).match(self.text, self.at)
        assert match is not None
        body = re.sub(r"\\x([0-9a-fA-F]{1,2})|\\([0-7]{1,3})", _escape_value, match.group(1))
        self.quoted = True
        self._add(body.replace("\\n", "\n").replace("\\t", "\t").replace("\\'", "'"), len(match.group()))

    def _double(self) -> None:
        self.quoted = True
        self._add("", 1)
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                self._add(following if following in '$`"\\' else char + following, 2)
            elif char in "$`":
                self._dollar(quoted=True)
            else:
                plain = _PLAIN_QUOTED.match(self.text, self.at)
                self._add(plain.group() if plain else char, len(plain.group()) if plain else 1)
        self.at += 1

    def _dollar(self, quoted: bool) -> None:
        if self.text.startswith("$((", self.at) or self.text.startswith("$(", self.at) or self.text[self.at] == "`":
            self._substitution()
            return
        match = _VARIABLE.match(self.text, self.at)
        if match is None:
            self._add(self.text[self.at], 1)
            return
        name = match["braced"] or match["bare"] or ""
        unknown = f"${name}" if name.isupper() else ""
        value = self.variables.get(name, match["default"] or unknown)
        self.at += len(match.group())
        if quoted or not re.search(r"\s", value):
            self._add(value, 0)
            return
        for index, part in enumerate(re.split(r"\s+", value)):
            if index:
                self._end_word()
            if part:
                self._add(part, 0)

    def _substitution(self) -> None:
        start = self.at + (1 if self.text[self.at] == "`" else 2)
        end = self._find("`", start) if self.text[self.at] == "`" else _closing(self.text, start)
        inner = pipelines(self.text[start:end], self.depth + 1)
        self.nested += inner
        carried = ""
        for command in inner[0] if len(inner) == 1 else []:
            carried = _printed(unwrap(command.argv), carried)
        self.at = end + 1
        spaced = carried.split() if not self.word and not self.quoted else [carried]
        for index, part in enumerate(spaced or [""]):
            if index:
                self._end_word()
            self._add(part, 0)

    def _operator(self, operator: str) -> None:
        if operator in _REDIRECTS:
            if self.word is not None and self.word.isdigit():
                self.word = None  # a file descriptor number
            self._end_word()
            self.redirect = operator
        elif operator in ("|", "|&"):
            self._end_command()
        else:
            self._end_pipeline()
        self.at += len(operator)
        if operator == "\n":
            self._read_documents()

    def _end_word(self) -> None:
        if self.word is None:
            return
        word, quoted = self.word, self.quoted
        self.word, self.quoted = None, False
        if self.redirect:
            self._redirect_to(word)
        elif not quoted and re.fullmatch(r"\{[^{}]+,[^{}]*\}", word):
            self.command.argv += word[1:-1].split(",")
        elif word and (self.command.argv or word not in KEYWORDS):
            self.command.argv.append(word)

    def _redirect_to(self, word: str) -> None:
        if self.redirect in ("<<", "<<-"):
            self.documents.append((word, self.command))
        elif self.redirect == "<<<":
            self.command.stdin = word
        else:
            self.command.redirects.append((self.redirect, word))
        self.redirect = ""

    def _end_command(self) -> None:
        self._end_word()
        self.redirect = ""
        if self.command.argv or self.command.redirects:
            self._assign(self.command.argv)
            self.pipeline.append(self.command)
        self.command = Command()

    def _assign(self, argv: list[str]) -> None:
        words = argv[1:] if argv and argv[0] in ("export", "declare", "local", "readonly") else argv
        matches = [_ASSIGNMENT.fullmatch(word) for word in words]
        self.variables.update({match[1]: match[2] for match in matches if match} if all(matches) else {})

    def _end_pipeline(self) -> None:
        self._end_command()
        if self.pipeline:
            self.found.append(self.pipeline)
        self.pipeline = []

    def _read_documents(self) -> None:
        for delimiter, command in self.documents:
            lines = []
            while self.at < len(self.text):
                end = self._find("\n", self.at)
                line = self.text[self.at : end]
                self.at = end + 1
                if line.lstrip("\t") == delimiter:
                    break
                lines.append(line)
            command.stdin = "\n".join(lines)
        self.documents = []


def _escape_value(match: re.Match[str]) -> str:
    return chr(int(match[1], 16) if match[1] else int(match[2], 8) & 0xFF)


def _closing(text: str, start: int) -> int:
    """Position of the `)` that closes a `$(` whose inside begins at `start`; the text's end when unclosed."""
    depth, quote, at = 1, "", start
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "()":
            depth += 1 if char == "(" else -1
            if depth == 0:
                return at
        at += 1
    return len(text)
