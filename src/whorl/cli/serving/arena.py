"""`whorl arena`: blind votes between models, by people or by a judge, and their ratings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whorl.cli.config_options import Configs, config_options
from whorl.cli.options import StoreOption, serve_extra

if TYPE_CHECKING:
    from whorl.evals.arena.options import AnswerSettings, BattleConfig
    from whorl.evals.arena.standings import Standings
    from whorl.serve.config import ServeConfig

Models = Annotated[
    list[str],
    typer.Argument(metavar="MODEL", help="[NAME=] an artifact, a folder of a model, or URL#MODEL of an API."),
]
VotesArgument = Annotated[
    Path, typer.Argument(metavar="VOTES", help="The log of an arena, or records of votes.")
]
Length = Annotated[bool, typer.Option("--length", help="Ratings at equal length of the answers.")]
ByVoter = Annotated[
    bool | None,
    typer.Option("--by-voter/--by-vote", help="Votes of one voter are correlated; default: with 20 voters."),
]
Draws = Annotated[int, typer.Option(min=0, help="Draws of the bootstrap; 0 leaves it out.")]
DEFAULT_LOG = Path("arena.sqlite")
DRAWS = 1000
ANSWER_OPTIONS = ("max_tokens", "temperature", "system", "complete")


def _configs() -> Configs:
    from whorl.evals.arena.options import AnswerSettings, BattleConfig

    return {"battle": (BattleConfig, ()), "answers": (AnswerSettings, ANSWER_OPTIONS)}


def _server_configs() -> Configs:
    from whorl.serve.config import ServeConfig

    return {"server": (ServeConfig, ("host", "port", "key_file")), **_configs()}


@config_options(_server_configs)
def serve(
    models: Models,
    *,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts: .txt with one in each line, or records.")
    ] = None,
    battle: BattleConfig,
    answers: AnswerSettings,
    server: ServeConfig,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="No keys, even on a public address.")] = False,
    store: StoreOption = None,
) -> None:
    """Serve a page on which people vote between the answers of two unnamed models.

    Sides are drawn. The names are shown after the vote, which moves the ratings on the page. Battles and votes are appended
    to a log, and the same command continues it.

    Examples:

        whorl arena serve quickstart/sft quickstart/distil --prompts prompts.txt

        whorl arena serve small=./Qwen3-0.6B http://127.0.0.1:8000/v1#large --port 8001

        whorl arena serve quickstart/pretrain other/pretrain --complete
    """
    with serve_extra():
        from whorl.serve.arena import ArenaState, run_arena_server
        from whorl.serve.server import bind_socket, check_auth_required
    from whorl.evals.arena.contestants import open_arena, read_prompts

    check_auth_required(server, no_auth)
    listening = bind_socket(server)  # before models are loaded
    drawn = [] if prompts is None else read_prompts(prompts, battle.field)
    arena = open_arena(models, battle, answers, store)

    def ready(url: str) -> None:
        print(f"{len(arena.names)} models, {arena.log.n_votes():,} votes in {battle.votes}", file=sys.stderr)
        print(f"page    {url}/\nratings {url}/#ratings", file=sys.stderr, flush=True)

    try:
        run_arena_server(ArenaState(arena, server, drawn), listening, ready)
    finally:
        arena.log.close()


@config_options(_configs)
def judge(
    models: Models,
    *,
    prompts: Annotated[
        Path, typer.Option(metavar="FILE", help="Prompts: .txt with one in each line, or records.")
    ],
    by: Annotated[str, typer.Option(metavar="MODEL", help="The judge, named as the models.")],
    battles: Annotated[int, typer.Option("-n", "--battles", min=1, help="Battles to run.")] = 100,
    battle: BattleConfig,
    answers: AnswerSettings,
    store: StoreOption = None,
) -> None:
    """Run battles over prompts with a model as judge, and print the ratings.

    The judge reads both orders of each pair; verdicts that disagree are a tie. Its votes are appended to the log.

    Examples:

        whorl arena judge quickstart/sft quickstart/distil --prompts prompts.txt --by http://127.0.0.1:8000/v1#judge -n 200
    """
    from whorl.evals.arena.contestants import open_arena, open_contestant, read_prompts
    from whorl.evals.arena.judging import BackendJudge, judge_battles
    from whorl.tracking.progress import Progress

    drawn = read_prompts(prompts, battle.field)
    arena = open_arena(models, battle, answers, store)
    name, backend = open_contestant(by, dtype=battle.dtype, store=store, timeout=battle.timeout)
    decide = BackendJudge(backend)
    with arena.log:
        with Progress(sys.stderr).task("Battles", battles, "battles") as bar:
            done = judge_battles(arena, decide, drawn, battles, f"judge:{name}", lambda _: bar.advance())
        print(
            f"{done.votes:,} votes, {done.no_verdict:,} battles without a verdict, {done.missing:,} without an answer"
        )
        if done.reason:
            print(f"last battle without a verdict: {done.reason}")
        if done.missing:
            for reason, n in arena.log.missing_reasons().most_common(3):
                print(f"{n:,} missing answers of {reason}")
        if found := arena.standings(DRAWS):
            _print(found)


def table(
    votes: VotesArgument = DEFAULT_LOG, length: Length = False, by_voter: ByVoter = None, draws: Draws = DRAWS
) -> None:
    """Print the ratings of votes: a log, or records with the fields of Chatbot Arena.

    Examples:

        whorl arena table arena.sqlite

        whorl arena table votes.jsonl --length
    """
    found, repeated, _ = _standings(votes, length, by_voter, draws)
    if repeated:
        print(f"{repeated:,} votes were there twice and count once")
    _print(found)


def page(
    votes: VotesArgument = DEFAULT_LOG,
    out: Annotated[Path, typer.Option("--out", "-o", help="Path of the page.")] = Path("arena.html"),
    length: Length = False,
    by_voter: ByVoter = None,
    draws: Draws = DRAWS,
) -> None:
    """Write the ratings as a static page: intervals, ranks, all meetings, first place.

    Examples:

        whorl arena page arena.sqlite --out ratings.html
    """
    from whorl.report.arena import write_arena_page

    found, _, missing = _standings(votes, length, by_voter, draws)
    print(write_arena_page(found, out, f"Arena: {votes.stem}", missing))


def export(
    votes: VotesArgument = DEFAULT_LOG,
    out: Annotated[Path, typer.Option("--out", "-o", help="Path of the records.")] = Path("votes.jsonl"),
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Prompt, chosen and rejected, for preference training.")
    ] = False,
) -> None:
    """Write the votes of a log with their conversations as JSONL.

    Examples:

        whorl arena export arena.sqlite --out votes.jsonl

        whorl arena export arena.sqlite --pairs --out preferences.jsonl
    """
    from whorl.evals.arena.arena_log import ArenaLog
    from whorl.evals.arena.vote_files import preference_records, vote_records, write_records

    _check_exists(votes)
    with ArenaLog(votes) as log:
        n = write_records((preference_records if pairs else vote_records)(log.battles()), out)
    print(f"{n:,} {'pairs' if pairs else 'votes'} in {out}")


def _standings(
    path: Path, length: bool, by_voter: bool | None, draws: int
) -> tuple[Standings, int, dict[str, int]]:
    """Return the standings, the number of votes that were there twice, and missing answers by model."""
    from whorl.errors import DataError
    from whorl.evals.arena.standings import standings
    from whorl.evals.arena.vote_files import load_missing, load_votes

    _check_exists(path)
    votes, repeated = load_votes(path)
    if not votes:
        raise DataError(f"{path} has no votes", expected="at least one", do="whorl arena serve MODEL MODEL")
    names = sorted({name for vote in votes for name in (vote.left, vote.right)})
    return (
        standings(votes, names, length=length, by_voter=by_voter, draws=draws),
        repeated,
        load_missing(path),
    )


def _check_exists(path: Path) -> None:
    from whorl.errors import DataError

    if not path.is_file():
        raise DataError(
            f"there is no file {path}", expected="the votes of an arena", do="whorl arena serve MODEL MODEL"
        )


def _print(found: Standings) -> None:
    from whorl.cli.text_table import print_table
    from whorl.report.arena import MEETING_HEADS, RATING_HEADS, meeting_cells, rating_cells

    print_table(RATING_HEADS, [rating_cells(row) for row in found.rows])
    print()
    print_table(MEETING_HEADS, [meeting_cells(each) for each in found.meetings], left=("second",))
    for effect in found.effects:
        interval = f"{effect.low:+.0f} to {effect.high:+.0f}"
        print(f"{effect.name}: {effect.points:+.0f} points per standard deviation ({interval})")
    print(f"\n{found.text}")
