"""`specdec chat` as a user meets it: in a pipe, and on a pseudo-terminal with tiny models."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import CHATML, sentencepiece_vocabulary, tiny

from specdec_cli import paths
from specdec_cli.cli import chat_settings, clipboard
from specdec_cli.cli import flag_groups as groups
from specdec_cli.cli.app import invoke
from specdec_cli.cli.commands import COMMANDS, completions, quoted, split_command
from specdec_cli.cli.editor import edited, editor
from specdec_cli.cli.line_editor import wants_vi
from specdec_cli.cli.lines import is_open_block, unquoted
from specdec_cli.errors import ModelLoadError, SpecdecError, UsageError
from specdec_cli.session import Session
from specdec_cli.tiny import byte_level_vocabulary

ROOT = Path(__file__).parents[1]
WAIT_S = 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny(folder, "target", chat_template=CHATML)
    tiny(folder, "draft", chat_template=CHATML, num_layers=1)
    tiny(folder, "other", chat_template=CHATML, seed=5)
    tiny(folder, "bare")
    tiny(folder, "family", chat_template=CHATML, vocabulary=sentencepiece_vocabulary())
    thinking = CHATML.replace("assistant\n{% endif %}", "assistant\n{{ '<think>\\n' }}{% endif %}")
    tiny(folder, "thinking", chat_template=thinking)
    return folder


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured costs, and whether llama.cpp works here, are found out once."""
    return tmp_path_factory.mktemp("shared-home")


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, shared_home: Path, tmp_path: Path) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("SPECDEC_")]:
        monkeypatch.delenv(name)
    for name in ("VISUAL", "EDITOR", "DISPLAY", "WAYLAND_DISPLAY", "INPUTRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPECDEC_HOME", str(shared_home))
    monkeypatch.setenv("SPECDEC_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    for path in (paths.state_dir() / "chat").glob("*"):
        path.unlink()
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


Run = Callable[..., SimpleNamespace]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> Run:
    """`specdec chat ARGUMENTS` in this process, with a pipe as its standard input."""

    def call(text: str | bytes, *arguments: str, target: str = "target.gguf") -> SimpleNamespace:
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
        capsys.readouterr()
        models = ["--target", str(folder / target)] if target else []
        code = invoke(["chat", *models, "-n", "8", "-t", "0", *arguments])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=int(code), out=out, err=err, lines=out.splitlines())

    return call


class TestPipe:
    def test_a_line_in_an_answer_out(self, run: Run) -> None:
        done = run("hi\nand again\n")
        assert done.code == 0
        assert len(done.lines) == 2
        assert done.err.count("8 tokens · ") == 2
        assert not set(done.out + done.err) & {"\x1b", "\r"}
        assert ">>>" not in done.out + done.err

    def test_quiet(self, run: Run) -> None:
        done = run("hi\n\n  \nagain", "-q")
        assert (done.code, done.err, len(done.lines)) == (0, "", 2)

    @pytest.mark.parametrize("text", ["", "\n\n", "/bye\nhi\n"])
    def test_nothing_to_answer(self, run: Run, text: str) -> None:
        done = run(text)
        assert (done.code, done.out) == (0, "")

    def test_the_conversation_is_sent_along(self, run: Run) -> None:
        both = run("hi\nand again\n").lines
        assert run("and again\n").lines[0] != both[1]
        assert run("hi\n").lines[0] == both[0]
        assert run("and again\n", "--continue").lines[0] == both[1]

    def test_any_bytes(self, run: Run) -> None:
        done = run(b"\xef\xbb\xbfhi\r\n\xff\xfe\n\x00\x1b[2J\n" + "漢字 👩‍👩‍👧 שלום\n".encode())
        assert (done.code, len(done.lines)) == (0, 4)
        assert done.out.splitlines()[0] == run("hi\n").out.splitlines()[0]

    def test_errors_and_on(self, run: Run) -> None:
        done = run("/retyr\n/set top-kk 1\n/load nowhere.json\n/set temperature warm\n/save\n/undo\n/bye now\nhi\n")
        assert (done.code, len(done.lines)) == (0, 1)
        for message in (
            "there is no command `/retyr`", "perhaps `/retry`", "there is no setting `top-kk`", "`top-k`",
            "cannot read `nowhere.json`", "temperature must be a number, not `warm`", "`/save` needs a FILE",
            "nothing to undo", "`/bye` takes nothing",
        ):  # fmt: skip
            assert message in done.err, message

    def test_messages_that_look_like_commands(self, run: Run) -> None:
        done = run("/etc/hosts is a file\n /help\n/usr\n")
        assert len(done.lines) == 2
        assert "there is no command `/usr`" in done.err

    def test_retry_undo_edit_clear(self, run: Run) -> None:
        one, two = run("hi\nand again\n").lines
        assert run("hi\n/retry\n").lines == [one, one]
        assert run("hi\nwhat\n/undo\nand again\n").lines[-1] == two
        assert run("hi\nwhat\n/edit and again\n").lines[-1] == two
        assert run("hi\nwhat\n/clear\nhi\n").lines[-1] == one
        assert "`/edit` needs a terminal" in run("hi\n/edit\n").err

    def test_system_message(self, run: Run) -> None:
        with_flag = run("hi\n", "-s", "be brief").out
        assert run("/system be brief\nhi\n").out == with_flag
        assert run("/system none\nhi\n", "-s", "be brief").out == run("hi\n").out
        assert "system  be brief\n" in run("/system\n", "-s", "be brief").err

    def test_settings_count_from_the_next_answer_on(self, run: Run) -> None:
        assert run("/set max-tokens 3\nhi\n").out == run("hi\n", "-n", "3").out
        assert run("/set temp 2\n/set seed 5\nhi\n").out == run("hi\n", "-t", "2", "--seed", "5").out
        assert (
            run("/set logit-bias 300=5 301=5\nhi\n").out
            == run("hi\n", "--logit-bias", "300=5", "--logit-bias", "301=5").out
        )
        whole = run("hi\n").lines[0]
        assert run(f"/set stop '{whole[4]}'\nhi\n").lines[0] == whole[: whole.index(whole[4])]
        assert json.loads(run("/set json-object on\nhi\n").out) is not None
        json_schema = '/set json-schema {"enum": ["yes"]}\nhi\n'
        assert run(json_schema).out == '"yes"\n'
        assert "internal" not in run("/set explain on\nhi\n").err

    def test_refused_settings_change_nothing(self, run: Run) -> None:
        lines = "/set top-p 2\n/set min-p 0.2\n/set min-p -1\n/set max-tokens 0\n/set draft-tokens 99\n/show\nhi\n"
        done = run(lines)
        for message in ("top-p must be", "min-p must be", "max-tokens must be", "draft-tokens must be"):
            assert message in done.err
        assert "min-p        0.2\n" in done.err
        assert done.out == run("hi\n", "--min-p", "0.2").out

    def test_show_and_stats(self, run: Run) -> None:
        done = run("hi\nagain\n/show\n/stats\n", "--draft", "draft.gguf", "-k", "2", target="target.gguf")
        assert done.code == 3
        done = run("hi\nagain\n/show\n/stats\n")
        assert "target       target.gguf" in done.err
        assert "2048 tokens; when it is full: drop" in done.err
        assert "2 answers · 16 tokens" in done.err
        assert "decoded by the target" in done.err

    def test_a_draft_of_another_family(self, run: Run, folder: Path) -> None:
        note = "Note: target and draft have different tokenizers, "
        arguments = ("--draft", str(folder / "family.gguf"), "--drafter", "model", "-k", "2")
        done = run(f"hi\nand again\n/draft off\nhi\n/draft on\n/model {folder / 'draft.gguf'}\n", *arguments)
        assert done.err.count(note) == 2
        assert done.lines[:2] == run("hi\nand again\n").lines
        assert note not in run("hi\n", *arguments, "-q").err
        lines = [json.loads(line) for line in run("hi\n", *arguments, "--json").lines]
        assert lines[0]["draft_method"] in {"string-level", "token-level"}

    def test_counts_are_those_of_the_conversation(self, run: Run) -> None:
        used = re.compile(r"context +(\d+) of")
        done = run("/show\nhi\n/show\n/save chat.json\n/undo\n/show\n")
        nothing, one, undone = map(int, used.findall(done.err))
        assert (nothing, undone) == (0, 0)
        assert one > 8
        assert abs(int(used.findall(run("/show\n", "--load", "chat.json").err)[0]) - one) <= 8
        done = run("/show\nhi\n/show\n", "--ctx", "60", "-n", "100", "--ignore-eos", "--no-draft")
        assert int(used.findall(done.err)[1]) <= 60

    def test_refusals_speak_of_the_conversation(self, run: Run) -> None:
        done = run("/set drafter best\n/set top-p 2\n/set draft-tokens x\n/hlp\n")
        assert "Error: drafter must be one of `auto`, `model`, `tree`, `ngram`, `none`, not `best`\n" in done.err
        assert "--help" not in done.err
        assert "SPECDEC" not in done.err
        assert done.err.count("Hint: `/set` shows all settings") == 3
        assert "perhaps `/help`;" in done.err

    def test_settings_of_the_model_are_told_once(self, run: Run) -> None:
        done = run("/set sampler-defaults model\n/set top-k 5\n/set top-p 0.9\n")
        assert done.err.count("sampling settings of the model") == 1

    def test_a_model_file_of_any_name(self, run: Run, folder: Path) -> None:
        Path("plain").symlink_to(folder / "other.gguf")
        assert re.search(r"target (plain|other\.gguf)", run("/model plain\n").err)

    def test_a_long_system_message(self, run: Run) -> None:
        done = run("hi\n", "-s", "word " * 100, "--ctx", "100", "--no-draft")
        assert "a shorter message or `/system` message" in done.err

    def test_the_last_conversation_is_broken(self, run: Run) -> None:
        run("hi\n")
        (paths.state_dir() / "chat" / "last.json").write_text("{")
        done = run("hi\n", "--continue")
        assert (done.code, "start without `--continue`" in done.err) == (2, True)

    def test_file(self, run: Run) -> None:
        Path("notes.txt").write_text("hello\n```\nworld")
        done = run("/file notes.txt\nhi\nhi\n/save chat.json\n")
        assert "notes.txt, 3 lines, goes in front of the next message" in done.err
        messages = json.loads(Path("chat.json").read_text())["messages"]
        assert messages[0]["content"] == "notes.txt:\n````\nhello\n```\nworld\n````\n\nhi"
        assert messages[2]["content"] == "hi"
        Path("picture").write_bytes(b"\0\1")
        done = run("/file picture\n/file .\n/file nowhere\n")
        assert "`picture` is not a text file" in done.err
        assert "Is a directory" in done.err
        assert "No such file" in done.err

    def test_save_and_load(self, run: Run) -> None:
        two = run("hi\n/set seed 3\n/save chat.json\nand again\n").lines[1]
        assert run("/load chat.json\nand again\n").lines == [two]
        assert run("and again\n", "--load", "chat.json").lines == [two]
        done = run("/show\n", "--load", "chat.json")
        assert "seed         3\n" in done.err
        # Nothing but the file names the models.
        assert run("and again\n", "--load", "chat.json", target="").lines == [two]
        assert "seed         4\n" in run("/show\n", "--load", "chat.json", "--seed", "4").err

    @pytest.mark.parametrize(
        "content", ["", "{}", '{"format": "specdec chat", "schema": 1, "messages": [], "settings": {"x": 1}}']
    )
    def test_a_file_that_is_no_conversation(self, run: Run, content: str) -> None:
        Path("chat.json").write_text(content)
        done = run("/load chat.json\nhi\n")
        assert (done.code, len(done.lines)) == (0, 1)
        assert "Error: " in done.err
        done = run("hi\n", "--load", "chat.json")
        assert (done.code, done.out) == (2, "")

    def test_save_takes_regular_files_and_new_names_alone(self, run: Run, tmp_path: Path) -> None:
        os.mkfifo("pipe")
        Path("device").symlink_to("/dev/null")
        Path("real.json").touch()
        Path("link.json").symlink_to("real.json")
        lines = [f"/save {name}\n" for name in ("pipe", "device", "/dev/full", "nowhere/x.json", "link.json", ".")]
        done = run("hi\n" + "".join(lines))
        assert (done.code, len(done.lines)) == (0, 1)
        assert done.err.count("is not a regular file") == 3
        assert f"cannot write `nowhere/x.json`: there is no folder `{tmp_path}/nowhere`" in done.err
        assert not Path("nowhere").exists()
        assert Path("link.json").is_symlink()
        assert json.loads(Path("real.json").read_text())["messages"]

    def test_a_file_names_no_other_files(self, run: Run) -> None:
        Path("g.gbnf").write_text('root ::= "no"')
        kept = {"ngram-cache": "made.db", "grammar": "g.gbnf", "json-schema": "s.json", "top-k": 7, "temperature": 0}
        content = {"format": "specdec chat", "schema": 1, "messages": [], "settings": kept}
        Path("chat.json").write_text(json.dumps(content))
        for done in (run("/load chat.json\nhi\n"), run("hi\n", "--load", "chat.json")):
            assert (done.code, len(done.lines)) == (0, 1)
            assert (
                "left out, as a file must not name others: ngram-cache, grammar, json-schema; `/set` sets" in done.err
            )
            assert re.search("settings of the file: top-k 7(, temperature 0.0)?\n", done.err)
            assert done.lines != ["no"]
        assert not Path("made.db").exists()
        # What the last conversation here had goes on, and an inline schema names no file.
        run("/set grammar g.gbnf\nhi\n")
        assert run("hi\n", "--continue").lines == ["no"]
        content["settings"] = {"json-schema": '{"enum": ["yes"]}'}
        Path("chat.json").write_text(json.dumps(content))
        assert run("hi\n", "--load", "chat.json").out == '"yes"\n'

    def test_a_file_with_an_unknown_setting_is_named(self, run: Run) -> None:
        content = {"format": "specdec chat", "schema": 1, "messages": [], "settings": {"x": 1}}
        Path("chat.json").write_text(json.dumps(content))
        assert "cannot load `chat.json`: there is no setting `x`" in run("/load chat.json\n").err

    def test_loading_what_was_with_other_models(self, run: Run, folder: Path) -> None:
        run("hi\n/save chat.json\n")
        assert "other models" not in run("/load chat.json\n").err
        done = run("/load chat.json\n", target="other.gguf")
        assert f"it was with other models: `/model {folder}/target.gguf` goes on with them" in done.err

    def test_older_turns_come_back(self, run: Run) -> None:
        many = "".join(f"message number {place}\n" for place in range(8))
        done = run(f"{many}/undo\n/undo\n/undo\n/undo\n/undo\n", "--ctx", "128", "--no-draft")
        assert re.search(r"taken back: .*\n(an older turn is|\d older turns are) sent again", done.err)
        # A larger context takes all of a conversation.
        run(many, "--ctx", "128", "--no-draft")
        assert "sent again" in run("and now\n", "--continue", "--no-draft").err

    def test_state_that_cannot_be_written(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("specdec_cli.cli.repl.keep_last", lambda _transcript: False)
        done = run("hi\nand again\n")
        assert (done.code, len(done.lines)) == (0, 2)
        assert done.err.count("\nthe conversation cannot be kept for `--continue`: ") == 1
        assert "set SPECDEC_HOME" in done.err

    @pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
    def test_messages_that_cannot_be_written(self, folder: Path, where: str) -> None:
        words = [sys.executable, "-m", "specdec_cli", "chat", "--target", str(folder / "target.gguf"), "-n", "4"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        command = ["/bin/sh", "-c", f'"$0" "$@" {where}', *words, "--no-draft"]
        done = subprocess.run(
            command, env=environment, input=b"hi\nand again\n/show\n", capture_output=True, check=False
        )
        assert (done.returncode, len(done.stdout.splitlines())) == (0, 2)

    def test_a_drawn_seed_is_told_for_greedy_answers_too(self, run: Run) -> None:
        starts = [json.loads(run("hi\n", "--json", *flags).lines[0]) for flags in ((), ("--seed", "5"))]
        assert [start["seed_drawn"] for start in starts] == [True, False]

    def test_json_lines(self, run: Run) -> None:
        records = [json.loads(line) for line in run("hi\nagain\n", "--json").lines]
        assert [record["type"] for record in records if record["type"] in ("start", "end")] == ["start", "end"] * 2
        page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
        for name in records[0]:
            assert f"| `{name}` |" in page, name

    def test_continue_and_history(self, run: Run) -> None:
        done = run("hi\n", "--continue")
        assert (done.code, "no conversation to continue" in done.err) == (2, True)
        run("hi\n", "--no-history")
        assert not (paths.state_dir() / "chat").exists() or not list((paths.state_dir() / "chat").iterdir())
        assert run("hi\n", "--continue", "--load", "x").code == 2

    def test_full_context(self, run: Run) -> None:
        many = "".join(f"message number {place}\n" for place in range(8))
        done = run(many, "--ctx", "128")
        assert (done.code, len(done.lines)) == (0, 8)
        assert re.search(r"the context of 128 tokens is full: the \d oldest turns are no longer sent", done.err)
        done = run(many, "--ctx", "128", "--on-full", "stop")
        assert done.code == 0
        assert "`/clear` or `/undo` make room" in done.err
        assert len(done.lines) < 8
        done = run(many, "--ctx", "128", "--on-full", "error")
        assert done.code == 1
        assert done.err.rstrip().splitlines()[-3].startswith("Error: the con")

    def test_thinking(self, run: Run) -> None:
        shown = run("hi\n", "--show-thinking", target="thinking.gguf")
        assert len(shown.out) > 1
        assert run("/set hide-thinking off\nhi\n", target="thinking.gguf").out == shown.out
        # A pipe takes the answer alone.
        for flags in ((), ("--hide-thinking",)):
            hidden = run("hi\n", *flags, target="thinking.gguf")
            assert (hidden.code, hidden.out) == (0, "\n")
            assert "(thinking)\n" in hidden.err

    def test_models_that_cannot_chat(self, run: Run) -> None:
        done = run("hi\n", target="bare.gguf")
        assert (done.code, "has no chat template" in done.err) == (1, True)
        done = run("hi\n", "nowhere", target="")
        assert done.code == 3
        assert run("hi\n", "--ctx", "4000").code == 2

    def test_other_models(self, run: Run, folder: Path) -> None:
        done = run(f"hi\n/model {folder}/other.gguf\nand again\n/model {folder}/bare.gguf\n/model nope\nlast\n/show\n")
        assert (done.code, len(done.lines)) == (0, 3)
        assert "target other.gguf" in done.err
        assert "has no chat template" in done.err
        assert "the models before are loaded again" in done.err
        assert "no pair is called `nope`" in done.err
        assert "target       other.gguf" in done.err
        assert "turns        3" in done.err

    def test_no_models_left(self, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        opened = Session.open

        def fails(*arguments: Any) -> Session:
            if calls:
                raise ModelLoadError(f"cannot load `{arguments[0].name}`")
            calls.append(1)
            return opened(*arguments)

        calls: list[int] = []
        monkeypatch.setattr(Session, "open", fails)
        done = run(f"hi\n/model {folder}/other.gguf\nand again\n")
        assert (done.code, len(done.lines)) == (1, 1)
        assert "cannot load `other.gguf`" in done.err
        assert done.err.rstrip().endswith("Error: cannot load `target.gguf`")

    def test_drafts_on_and_off(self, run: Run, folder: Path) -> None:
        draft = ("--draft", str(folder / "draft.gguf"))
        done = run("hi\n/draft off\nhi\n/draft\n/draft on\nhi\n/draft auto\nhi\n/draft maybe\n/show\n", *draft)
        assert (done.code, len(done.lines)) == (0, 4)
        assert "drafts: off\n" in done.err
        assert "drafts: on, 5 tokens at most\n" in done.err
        assert "`/draft` takes `on`, `off`, `auto`, not `maybe`" in done.err
        # Begun without a draft model, which is loaded when it is wanted.
        done = run("/show\n/draft on\nhi\n/show\n", "--no-draft", *draft)
        assert re.search("draft model +none", done.err)
        assert re.search("draft model +draft.gguf", done.err)
        assert " accepted · " in done.err

    def test_needs_a_draft_model(self, run: Run) -> None:
        assert "`--drafter model` needs a draft model" in run("/set drafter model\n").err

    def test_null_characters(self, run: Run) -> None:
        lines = "/file a\0b\n/save a\0b\n/load a\0b\n/model a\0b.gguf\n/set ngram-cache a\0b\n/system a\0b\nhi\n"
        done = run(lines)
        assert (done.code, len(done.lines)) == (0, 1)
        assert done.err.count("takes no null character") == 5

    def test_statistics_that_cannot_be_used(self, run: Run) -> None:
        Path("notes.db").write_text("no database, but long enough to look at, and to be left as it is" * 9)
        done = run("/set ngram-cache notes.db\nhi\n")
        assert (done.code, len(done.lines)) == (0, 1)
        assert "Warning: " in done.err
        assert Path("notes.db").read_text().startswith("no database")

    def test_ctrl_c_in_a_pipe_ends_it(self, folder: Path, shared_home: Path) -> None:
        command = [sys.executable, "-m", "specdec_cli", "chat", "--target", str(folder / "target.gguf")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        pipe = subprocess.PIPE
        arguments = [*command, "-n", "1500", "--ignore-eos", "--no-draft"]
        with subprocess.Popen(arguments, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"hi\nand again\n")
            process.stdin.flush()
            first = process.stdout.read(8)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 130
        assert b"(stopped)" in err
        assert messages()[1] == (first + out).decode().removesuffix("\n")

    def test_copy(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "no answer to copy" in run("/copy\n").err
        copied: list[str] = []
        monkeypatch.setattr(clipboard, "copy", lambda text, _terminal: copied.append(text) or "copied by a test")
        done = run("hi\n/copy\n")
        assert copied == [done.lines[0].strip()]
        assert "\ncopied by a test\n" in done.err


# --- settings ----------------------------------------------------------------------------------------------------


def settings() -> chat_settings.Settings:
    return chat_settings.Settings(
        groups.DraftingFlags(), groups.SamplingFlags(), groups.StructureFlags(), groups.ChatFlags()
    )


class TestSettings:
    def test_every_option_of_run_is_there(self) -> None:
        names = {
            field.replace("_", "-")
            for group in (groups.DraftingFlags, groups.SamplingFlags, groups.StructureFlags, groups.ChatFlags)
            for field in group.__dataclass_fields__
        }
        assert set(chat_settings.names()) == names

    @pytest.mark.parametrize("name", chat_settings.names())
    def test_shown_and_reset(self, name: str) -> None:
        assert settings().value(name)
        assert settings().with_value(name, "default") == settings()

    @pytest.mark.parametrize(
        ("name", "text", "shown"),
        [
            ("temperature", "0.25", "0.25"),
            ("temp", "1", "1.0"),
            ("--top-k", "5", "5"),
            ("t", "0", "0.0"),
            ("top_k", "5", "5"),
            ("presence-penalty", "-1", "-1.0"),
            ("stop", "'a b' c", "'a b' c"),
            ("stop", "don't", "'don'\"'\"'t'"),
            ("ignore-eos", "on", "on"),
            ("no-draft", "yes", "on"),
            ("ngram-cache", '"my file.db"', "my file.db"),
            ("json-schema", '{"type": "object"}', '{"type": "object"}'),
            ("drafter", "ngram", "ngram"),
            ("on-full", "stop", "stop"),
        ],
    )
    def test_values(self, name: str, text: str, shown: str) -> None:
        changed = settings().with_value(name, text)
        assert changed.value(name) == shown
        assert len(changed.given) == 1
        assert settings().with_values(changed.chosen()) == changed

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("temperature", "warm", "temperature must be a number, not `warm`"),
            ("top-k", "1.5", "top-k must be a whole number, not `1.5`"),
            ("seed", "x", "seed must be a whole number, not `x`"),
            ("drafter", "best", "drafter must be one of `auto`, `model`, `tree`, `ngram`, `none`, not `best`"),
            ("ignore-eos", "maybe", "ignore-eos is on or off, not `maybe`"),
            ("temprature", "1", "no setting `temprature`"),
            ("ctx", "100", "fixed once the models are loaded"),
            ("", "1", "no setting ``"),
        ],
    )
    def test_refused(self, name: str, text: str, message: str) -> None:
        with pytest.raises(UsageError, match=re.escape(message)):
            settings().with_value(name, text)

    def test_environment_does_not_leak(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECDEC_TOP_K", "3")
        assert settings().with_value("temp", "1").value("top-k") == "40"


# --- lines, completion, clipboard, editor ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/help", ("help", "")),
        ("/Set  top-k  4 ", ("set", "top-k  4")),
        ("/system two\nlines", ("system", "two\nlines")),
        ("/?", ("?", "")),
        ("/etc/hosts", None),
        (" /help", None),
        ("/", None),
        ("//", None),
        ("hi /help", None),
    ],
)
def test_split_command(line: str, expected: tuple[str, str] | None) -> None:
    assert split_command(line) == expected


def test_blocks() -> None:
    assert is_open_block('"""a')
    assert is_open_block('"""')
    assert is_open_block(' """a\nb')
    assert not is_open_block('"""a"""')
    assert not is_open_block('"""\na\n"""\n')
    assert not is_open_block("a")
    assert unquoted('"""\na\n\nb\n"""') == "a\n\nb"
    assert unquoted('"""a"""') == "a"
    assert unquoted('say """') == 'say """'


def test_completions() -> None:
    assert completions("/he") == [("/help", 3)]
    assert {text for text, _ in completions("/")} == {f"/{name}" for name in COMMANDS}
    assert ("top-k", 4) in completions("/set top-")
    assert completions("/set ignore-eos o") == [("on", 1), ("off", 1)]
    assert ("ngram", 1) in completions("/set drafter n")
    assert completions("/draft a") == [("auto", 1)]
    assert ("qwen2.5-coder-1.5b", 4) in completions("/model qwen")
    Path("notes").mkdir()
    Path("notes/a b.txt").touch()
    Path(".hidden").touch()
    assert completions("/file ") == [("notes/", 0)]
    assert completions("/save no") == [("notes/", 2)]
    assert completions("/load notes/a") == [("a b.txt", 1)]
    assert completions("/file .h") == [(".hidden", 2)]
    assert completions("/file nowhere/x") == []
    assert completions("/file ~nobody-here/x") == []
    assert completions("/bye x") == []
    assert completions("hello /he") == []
    assert completions("/file a\nb") == []


def test_quoted() -> None:
    assert quoted("a.md", "x\n") == "a.md:\n```\nx\n```\n\n"
    assert quoted("a.md", "`````").startswith("a.md:\n``````\n")


def test_readline_settings(tmp_path: Path) -> None:
    path = tmp_path / "inputrc"
    assert not wants_vi({"INPUTRC": str(path)})
    path.write_text("# set editing-mode vi\n set editing-mode vi\n")
    assert wants_vi({"INPUTRC": str(path)})
    path.write_text("set editing-mode vi\nset editing-mode emacs\n")
    assert not wants_vi({"INPUTRC": str(path)})
    path.write_bytes(b"\xff\xfe")
    assert not wants_vi({"INPUTRC": str(path)})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestClipboard:
    def test_tool(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        script = tmp_path / "xclip"
        script.write_text(f"#!/bin/sh\ncat > {tmp_path}/copied\n")
        script.chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        terminal = Terminal()
        assert clipboard.copy("grüße", terminal, {"DISPLAY": ":0"}) == "copied by xclip"
        assert (tmp_path / "copied").read_text("utf-8") == "grüße"
        assert terminal.getvalue() == ""
        script.write_text("#!/bin/sh\nexit 1\n")
        said = clipboard.copy("a", terminal, {"DISPLAY": ":0", "TERM": "xterm"})
        assert said.startswith("`xclip` failed; sent to the terminal's clipboard (OSC 52)")
        with pytest.raises(SpecdecError, match="`xclip` failed; no other way"):
            clipboard.copy("a", io.StringIO(), {"DISPLAY": ":0"})

    def test_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        terminal = Terminal()
        assert clipboard.copy("a\ud800", terminal, {"TERM": "xterm"}).startswith("sent to the terminal's clipboard")
        assert terminal.getvalue() == "\x1b]52;c;YT8=\x07"
        with pytest.raises(SpecdecError, match="clipboard"):
            clipboard.copy("a", terminal, {"TERM": "dumb"})
        with pytest.raises(SpecdecError, match="clipboard"):
            clipboard.copy("a", io.StringIO(), {})


def test_editor(tmp_path: Path) -> None:
    script = tmp_path / "my editor"
    script.write_text('#!/bin/sh\necho "$1" >> "$2"\n')
    script.chmod(0o700)
    assert edited("a", f"'{script}' b") == "a\nb"
    with pytest.raises(SpecdecError, match="cannot run the editor"):
        edited("a", str(tmp_path / "nowhere"))
    with pytest.raises(SpecdecError, match="ended with 1"):
        edited("a", "false")
    # Ctrl-C is the editor's.
    script.write_text('#!/bin/sh\ntrap "echo trapped >> $1" INT\nkill -INT $PPID $$\n')
    assert edited("a", f"'{script}'") == "a\ntrapped"
    script.write_text("#!/bin/sh\nkill -INT $$\n")
    with pytest.raises(SpecdecError, match="ended with -2"):
        edited("a", f"'{script}'")
    with pytest.raises(SpecdecError, match="cannot run the editor"):
        edited("a", "'")


def test_the_editor_that_is_named() -> None:
    assert editor({"VISUAL": "a", "EDITOR": "b"}) == "a"
    assert editor({"VISUAL": " ", "EDITOR": "b"}) == "b"
    assert editor({"EDITOR": ""}) is None


# --- on a pseudo-terminal ----------------------------------------------------------------------------------------

READY = r"(?s)\?2004h.*?>>>"
"""The prompt is there, and takes keys."""


_PROGRAM = """
import os
import specdec_cli.__main__
import specdec_cli.cli.repl

specdec_cli.cli.repl._TWICE_S = float(os.environ.get("TWICE_S", "1"))
specdec_cli.__main__.main()
"""


class Screen:
    """A `specdec chat` on a pseudo-terminal."""

    def __init__(self, folder: Path, *arguments: str, shell: str = "", **environment: str) -> None:
        pexpect = pytest.importorskip("pexpect")
        self.eof, self.raw = pexpect.EOF, ""
        words = [sys.executable, "-c", _PROGRAM, "chat", "--target", str(folder / "target.gguf"), *arguments]
        env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        env |= {"TERM": "xterm", "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"} | environment
        command, options = words[0], words[1:]
        if shell:
            command, options = "/bin/sh", ["-c", f'"$0" "$@" {shell}', *words]
        self.child = pexpect.spawn(
            command, options, env=env, encoding="utf-8", codec_errors="replace", timeout=WAIT_S, dimensions=(24, 80)
        )

    def expect(self, pattern: str) -> str:
        """What was shown up to and with this, without styles and movements of the cursor."""
        self.child.expect(pattern)
        self.raw = str(self.child.before) + str(self.child.after)
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw)

    def ready(self) -> str:
        return self.expect(READY)

    def send(self, text: str) -> None:
        self.child.send(text)

    def say(self, text: str) -> str:
        """A line, and everything up to the next prompt."""
        self.child.send(text + "\r")
        return self.ready()

    def key(self, letter: str) -> None:
        self.child.sendcontrol(letter)

    def code(self) -> int:
        self.child.expect(self.eof)
        self.child.close()
        return int(self.child.exitstatus if self.child.exitstatus is not None else -self.child.signalstatus)


@pytest.fixture
def screen(folder: Path) -> Iterator[Callable[..., Screen]]:
    screens: list[Screen] = []

    def call(*arguments: str, **options: str) -> Screen:
        screens.append(Screen(folder, *arguments, **options))
        return screens[-1]

    yield call
    for each in screens:
        each.child.close(force=True)


Opened = Callable[..., Screen]


def messages() -> list[str]:
    """What the last conversation consists of."""
    data = json.loads((paths.state_dir() / "chat" / "last.json").read_text())
    return [message["content"] for message in data["messages"]]


class TestTerminal:
    def test_keys_pressed_while_an_answer_is_written(self, screen: Opened) -> None:
        chat = screen("-n", "2000", "--ignore-eos", "-t", "0", "--no-draft")
        chat.ready()
        chat.send("hello\r")
        chat.expect(r"2004l\r?\n?[^\r\n]*[\w]{8}")
        chat.send("/system typed ahead")
        time.sleep(0.3)
        chat.key("c")
        shown = chat.expect(r"\(stopped\)")
        assert "typed" not in shown
        assert "^C" not in shown
        chat.ready()
        assert "the system message is set" in chat.say("")
        assert "typed ahead" in chat.say("/show")
        chat.key("d")
        assert chat.code() == 0

    def test_bytes_that_the_locale_lacks(self, screen: Opened) -> None:
        chat = screen("-n", "4", LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii:surrogateescape")
        chat.ready()
        chat.say("gr\u00fc\u00dfe")
        assert messages()[0] == "gr\u00fc\u00dfe"
        chat.key("d")
        assert chat.code() == 0

    def test_a_conversation(self, screen: Opened, tmp_path: Path) -> None:
        script = tmp_path / "editor"
        script.write_text('#!/bin/sh\nprintf "edited text" > "$1"\n')
        script.chmod(0o700)
        chat = screen("-n", "8", VISUAL=str(script))
        begin = chat.ready()
        for hint in ("/help", "Ctrl-D or /bye leaves", 'Alt-Enter or """ for several lines', "target target.gguf"):
            assert hint in begin
        assert "8 tokens" in chat.say("hello")
        assert "there is no command `/stat`" in chat.say("/stat")
        assert "1 answer · 8 tokens" in chat.say("/stats")
        assert re.search("turns +1", chat.say("/show"))
        # Completed from its beginning.
        chat.send("/hel\t")
        chat.expect("/help")
        assert "begin a new conversation" in chat.say("")
        assert "max-tokens 4" in chat.say("/set max-tokens 4")
        assert "4 tokens" in chat.say("/retry")
        assert "taken back: hello" in chat.say("/undo")
        chat.key("c")
        assert "Ctrl-D or /bye leaves" in chat.ready()
        chat.send("never sent")
        chat.key("c")
        assert "4 tokens" in chat.say("sent")
        assert messages()[::2] == ["sent"]
        assert "4 tokens" in chat.say("/edit")
        assert messages()[::2] == ["edited text"]
        chat.key("d")
        assert chat.code() == 0

    def test_several_lines(self, screen: Opened) -> None:
        chat = screen("-n", "4")
        chat.ready()
        chat.send("one\x1b\rtwo")
        assert "4 tokens" in chat.say("")
        assert messages()[-2] == "one\ntwo"
        chat.send('"""three\r')
        chat.send("four\r")
        assert "4 tokens" in chat.say('"""')
        assert messages()[-2] == "three\nfour"
        chat.say("/clear")
        lines = "\n".join(f"{place}" for place in range(500))
        chat.send(f"\x1b[200~{lines}\x1b[201~")
        assert "4 tokens" in chat.say("")
        assert len(messages()) == 2
        assert messages()[0] == lines
        chat.send("/bye\r")
        assert chat.code() == 0

    def test_resize_and_ctrl_c_while_generating(self, screen: Opened) -> None:
        chat = screen("-n", "2000", "--ignore-eos", "-t", "0", "--no-draft")
        chat.ready()
        chat.send("hello\r")
        # The answer has begun.
        chat.expect(r"2004l\r?\n?[^\r\n]*[\w]{8}")
        for columns in (20, 200, 7, 80):
            chat.child.setwinsize(24, columns)
        chat.key("c")
        assert "(stopped)" in chat.expect(r"\(stopped\)")
        chat.ready()
        partial = messages()[1]
        assert partial
        assert '"reason": "interrupted"' in (paths.state_dir() / "chat" / "last.json").read_text()
        # Longer than the time in which a second Ctrl-C leaves.
        time.sleep(1.2)
        chat.key("c")
        assert "Ctrl-D or /bye leaves" in chat.ready()
        chat.say("/set max-tokens 5")
        assert "5 tokens" in chat.say("again")
        assert messages()[1] == partial
        chat.key("d")
        assert chat.code() == 0

    def test_second_ctrl_c_leaves(self, screen: Opened) -> None:
        # A slow machine needs longer to come back to the prompt.
        chat = screen("-n", "2000", "--ignore-eos", "--no-draft", TWICE_S="60")
        chat.ready()
        chat.send("hello\r")
        chat.expect(r"2004l\r?\n?[^\r\n]*[\w]{8}")
        chat.key("c")
        for _ in range(20):
            time.sleep(0.1)
            if not chat.child.isalive():
                break
            chat.key("c")
        assert chat.code() == 130
        assert messages()[0] == "hello"

    def test_history_across_two_starts(self, screen: Opened) -> None:
        chat = screen("-n", "4")
        chat.ready()
        chat.say("the first message")
        chat.key("d")
        assert chat.code() == 0
        mode = (paths.state_dir() / "chat" / "history").stat().st_mode
        assert mode & 0o077 == 0
        chat = screen("-n", "4", "--continue")
        assert "1 message and its answer so far; the last one: the first message" in chat.ready()
        chat.send("\x1b[A")
        chat.expect("the first message")
        assert "4 tokens" in chat.say("")
        assert messages()[::2] == ["the first message", "the first message"]
        chat.key("d")
        assert chat.code() == 0

    def test_small_terminal(self, screen: Opened) -> None:
        chat = screen("-n", "4")
        chat.child.setwinsize(1, 1)
        chat.expect(r"\?2004h")
        chat.send("hi\r")
        chat.expect(r"\?2004h")
        chat.key("d")
        assert chat.code() == 0
        assert messages()[0] == "hi"

    def test_dumb_terminal_and_old_encoding(self, screen: Opened) -> None:
        chat = screen("-n", "4", TERM="dumb", LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
        chat.expect(">>> ")
        chat.send("hi\n")
        chat.expect("4 tokens")
        assert "\x1b" not in chat.raw
        chat.expect(">>> ")
        chat.send('"""a\n')
        chat.expect(r"\.\.\. ")
        chat.send('b"""\n')
        chat.expect("4 tokens")
        chat.expect(">>> ")
        chat.key("d")
        assert chat.code() == 0
        assert messages()[2] == "a\nb"

    def test_answers_alone_go_to_a_file(self, screen: Opened, tmp_path: Path) -> None:
        chat = screen("-n", "4", "--no-history", shell=f"> {tmp_path}/out")
        chat.ready()
        chat.say("hi")
        chat.say("/show")
        chat.key("d")
        assert chat.code() == 0
        out = (tmp_path / "out").read_text("utf-8", "replace")
        assert len(out) >= 4
        assert not [part for part in ("\x1b", "turns", ">>>") if part in out]
        assert list((paths.state_dir() / "chat").glob("*")) == []

    def test_vi_keys(self, screen: Opened, tmp_path: Path) -> None:
        (tmp_path / "inputrc").write_text("set editing-mode vi\n")
        chat = screen("-n", "4", INPUTRC=str(tmp_path / "inputrc"))
        chat.ready()
        chat.send("one two")
        chat.expect("two")
        chat.send("\x1b")
        time.sleep(1)
        assert "4 tokens" in chat.say("dbx")
        assert messages()[0] == "one "
        chat.key("d")
        assert chat.code() == 0


def test_the_models_text_cannot_reach_the_terminal(screen: Opened, folder: Path, tmp_path: Path) -> None:
    """A model that prefers bytes of escape sequences: nothing of it arrives as such."""
    plain = byte_level_vocabulary()
    words = plain.__class__(plain.tokens, plain.types, plain.metadata, frozenset({0x1B, 0x5B, 0x9B, 0x07, 0x41}))
    tiny(tmp_path, "evil", chat_template=CHATML, vocabulary=words)
    chat = screen("--target", str(tmp_path / "evil.gguf"), "-n", "40", "--plain", "-q", "--seed", "1")
    chat.ready()
    chat.say("hi")
    answer = chat.raw.split("2004l")[1].split("\x1b[?2004h")[0]
    assert "\u2407" in answer
    assert not set(answer) & {"\x1b", "\x07"}
    assert "\x07" in messages()[1]
    chat.key("d")
    assert chat.code() == 0
