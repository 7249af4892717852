"""What each slash command does: checks its words, then asks the controller or the app."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from kvq.config import parse_budget, parse_kv
from kvq.errors import UsageError
from kvq_apps import output
from kvq_apps.chat import interchange
from kvq_apps.chat.commands import parse_command
from kvq_apps.chat.controller import ChatController
from kvq_apps.chat.messages import ReplyStats


class Screen(Protocol):
    """What the commands need of the app."""

    def say(self, text: str, *, error: bool = False) -> None: ...
    def pick(self, text: str) -> None: ...
    def ask_for_title(self, chat_id: str) -> object: ...
    def ask_to_delete(self, chat_id: str) -> object: ...
    def choose_theme(self, name: str) -> None: ...
    def action_help(self) -> None: ...
    def action_new_chat(self) -> None: ...
    def action_retry(self) -> None: ...
    def action_edit(self) -> None: ...
    def action_copy(self) -> None: ...
    def action_copy_fence(self) -> None: ...
    def quit(self) -> None: ...


class SlashCommands:
    """The commands by name."""

    def __init__(self, screen: Screen, controller: ChatController) -> None:
        self._screen = screen
        self._controller = controller
        self.by_name: Mapping[str, Callable[[str], object]] = {
            "help": lambda _: screen.action_help(),
            "new": lambda _: screen.action_new_chat(),
            "rename": self._rename,
            "delete": lambda _: screen.ask_to_delete(controller.conversation.id),
            "retry": lambda _: screen.action_retry(),
            "more": lambda _: controller.do(controller.more),
            "drafts": self._drafts,
            "edit": lambda _: screen.action_edit(),
            "exact": lambda _: controller.do(controller.reread),
            "copy": self._copy,
            "system": self._system,
            "set": lambda words: screen.say(controller.settings.change(words)),
            "show": lambda _: screen.say("\n".join(self._facts())),
            "kv": self._kv,
            "stats": lambda _: screen.say(stats_text(controller.engine.stats)),
            "model": self._model,
            "save": lambda _: controller.do(controller.save_now),
            "load": self._load,
            "export": self._export,
            "search": screen.pick,
            "theme": screen.choose_theme,
            "quit": lambda _: screen.quit(),
        }

    def run(self, line: str) -> None:
        """Does what `line` says. Raises `KvqError`."""
        name, argument = parse_command(line)
        self.by_name[name](argument)

    def _copy(self, what: str) -> None:
        if what == "code":
            self._screen.action_copy_fence()
        else:
            self._screen.action_copy()

    def _rename(self, title: str) -> None:
        chat_id = self._controller.conversation.id
        if title:
            self._controller.do(partial(self._controller.rename_chat, chat_id, title))
        else:
            self._screen.ask_for_title(chat_id)

    def _drafts(self, words: str) -> None:
        if not words.isdecimal() or not 1 <= int(words) <= 9:
            raise UsageError("/drafts needs a number from 1 to 9")
        self._controller.make_drafts(int(words))

    def _system(self, text: str) -> None:
        controller = self._controller
        if not text:
            self._screen.say(f"system: {controller.conversation.system or '(none)'}")
            return
        controller.settings.system = text
        if controller.conversation.messages:
            self._screen.say("the system message begins with the next chat: /new")
        else:
            controller.conversation.set_system(text)
            self._screen.say(f"system: {text}")

    def _kv(self, words: str) -> None:
        k_bits = v_bits = budget = None
        for word in words.split():
            if ":" in word or word in ("fp", "2", "4", "8"):
                k_bits, v_bits = parse_kv(word, "/kv ")
            else:
                parse_budget(word)
                budget = word
        if k_bits is None and budget is None:
            raise UsageError("/kv needs K:V widths, a size, or both: /kv 4:2 64MiB")
        self._controller.do(partial(self._controller.change_kv, k_bits, v_bits, budget))

    def _model(self, name: str) -> None:
        client_for = self._controller.client_for
        if not name or client_for is None:
            raise UsageError("/model needs a NAME: a bundle, a checkpoint folder, or a hub id")
        self._controller.do(partial(self._controller.change_model, client_for(name)))

    def _load(self, name: str) -> None:
        if not name:
            raise UsageError("/load needs a FILE: JSON lines, Markdown or ChatGPT's JSON")
        self._controller.do(partial(self._controller.load_file, interchange.path_of(name)))

    def _export(self, name: str) -> None:
        if not name:
            raise UsageError("/export needs a FILE: .md for Markdown, otherwise JSON lines")
        messages = self._controller.conversation.messages
        interchange.export_chat(interchange.path_of(name), messages)
        self._screen.say(f"{len(messages)} messages are written to {name}")

    def _facts(self) -> list[str]:
        facts = self._controller.engine.facts
        lines = ["no model"]
        if facts is not None:
            lines = [f"model {facts.model}, context {facts.context_tokens} tokens"]
            if facts.k_bits:
                widths = output.kv_text(facts.k_bits, facts.v_bits)
                lines[0] += f", KV {widths} of {output.format_bytes(facts.kv_budget)}"
        return lines + self._controller.settings.lines()


def stats_text(stats: ReplyStats) -> str:
    """What a reply cost, in two lines."""
    return (
        f"{stats.prompt_tokens} prompt tokens, {stats.cached_tokens} of them cached, "
        f"{stats.encoded_tokens} encoded, first token after {stats.ttft_ms:.0f} ms\n"
        f"{stats.new_tokens} new tokens at {stats.decode_tok_s:.1f} tok/s, "
        f"KV {output.format_bytes(stats.kv_bytes)}"
    )
