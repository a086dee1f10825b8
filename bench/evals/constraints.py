"""The 25 kinds of constraints of IFEval against the checker of its authors, as lm-evaluation-harness ships it.

    python bench/evals/constraints.py --peer lmeval=PYTHON --save

Random texts: words, punctuation, marks of every kind, and texts that nearly satisfy a constraint. Both sides check each text
against all kinds with random arguments. Counted by kind: equal verdicts. Printed: texts with different ones.

The peer needs the data of NLTK's Punkt tokenizer, which is not part of a package. Here an untrained Punkt splits sentences
and NLTK's Treebank tokenizer splits words. langdetect gets the seed 0.

The bar of 1 holds for the kinds with an exact definition. The other kinds (EXCEPT) are about languages and sentences, where
the rules of both sides differ; their share is shown.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from _peers import environment, interpreters
from _run import claim, parse, sized, skip

from whorl.evals.grading.constraints import CHECKS, read_constraints, satisfies

EXCEPT = (
    "language:response_language", "length_constraints:number_sentences", "change_case:english_capital",
    "change_case:english_lowercase", "change_case:capital_word_frequency",
)  # fmt: skip
PEER = r"""
import json, sys, logging
import nltk
nltk.data.find = lambda *a, **k: None  # no download at import
import langdetect
langdetect.DetectorFactory.seed = 0
from lm_eval.tasks.ifeval import instructions_registry, instructions_util, utils
logging.disable(logging.CRITICAL)
from nltk.tokenize import PunktSentenceTokenizer, NLTKWordTokenizer
instructions_util._get_sentence_tokenizer = lambda: PunktSentenceTokenizer()
words = NLTKWordTokenizer()
split = PunktSentenceTokenizer().tokenize
nltk.word_tokenize = lambda text: [w for s in split(text) for w in words.tokenize(s)]
out = []
for kind, arguments, text in json.load(open(sys.argv[1])):
    record = utils.InputExample(0, [kind], "", [arguments])
    out.append([
        utils.test_instruction_following_strict(record, text).follow_all_instructions,
        utils.test_instruction_following_loose(record, text).follow_all_instructions,
    ])
json.dump(out, open(sys.argv[2], "w"))
"""
TEXT_WORDS = (
    "the a of and to in is that for it with was on are be this from or have not which you can sea boat river I so but when "
    "tree house green happy quickly running NASA BIG USA Paris London Section don't it's well-known 3.5 42 1,000 sea's café"
)
WORDS = TEXT_WORDS.split()
SENTENCES = {
    "en": "The boat is on the river. It is not that big, but we like it.",
    "de": "Das Boot ist auf dem Fluss. Es ist nicht so groß, aber wir mögen es.",
    "fr": "Le bateau est sur la rivière. Il n'est pas très grand, mais nous l'aimons.",
    "es": "El barco está en el río. No es muy grande, pero nos gusta.",
    "it": "La barca è sul fiume. Non è molto grande, ma ci piace.",
    "pt": "O barco está no rio. Não é muito grande, mas nós gostamos dele.",
    "ru": "Лодка на реке. Она не очень большая, но она нам нравится.",
    "hi": "नाव नदी पर है। यह बहुत बड़ी नहीं है, लेकिन हम को पसंद है।",
    "ar": "القارب في النهر. ليس كبيرا جدا لكننا نحبه.",
    "fa": "قایق روی رودخانه است. خیلی بزرگ نیست، اما ما آن را دوست داریم و چیزی نمی‌گوییم.",
    "ko": "배가 강에 있습니다. 그다지 크지는 않지만 우리는 좋아합니다.",
    "th": "เรืออยู่บนแม่น้ำ มันไม่ใหญ่มาก แต่เราชอบมัน",
    "vi": "Chiếc thuyền ở trên sông. Nó không lớn lắm nhưng chúng tôi thích nó.",
    "bg": "Лодката е на реката. Тя не е много голяма, но ние я харесваме.",
    "fi": "Vene on joella. Se ei ole kovin suuri, mutta me pidämme siitä, kun se on siellä.",
    "sw": "Mashua iko kwenye mto. Si kubwa sana lakini tunaipenda kwa kuwa ni yetu.",
    "ta": "படகு ஆற்றில் உள்ளது. அது மிகப் பெரியது அல்ல.",
    "te": "పడవ నదిలో ఉంది. అది చాలా పెద్దది కాదు.",
    "kn": "ದೋಣಿ ನದಿಯಲ್ಲಿದೆ. ಅದು ತುಂಬಾ ದೊಡ್ಡದಲ್ಲ.",
    "gu": "હોડી નદી પર છે. તે બહુ મોટી નથી.",
    "pa": "ਕਿਸ਼ਤੀ ਨਦੀ ਉੱਤੇ ਹੈ। ਇਹ ਬਹੁਤ ਵੱਡੀ ਨਹੀਂ ਹੈ।",
    "bn": "নৌকাটি নদীতে আছে। এটি খুব বড় নয়।",
    "ur": "کشتی دریا پر ہے۔ یہ بہت بڑی نہیں ہے لیکن ہم اسے پسند کرتے ہیں۔",
    "mr": "बोट नदीवर आहे. ती फार मोठी नाही, पण ती आम्हाला आवडते आणि आम्ही खुश आहोत.",
    "ne": "डुङ्गा नदीमा छ। यो धेरै ठूलो छैन, तर हामी यसलाई मन पराउँछौं र खुसी छौं।",
}
REQUEST = "Write a poem about the sea"


def random_text(rng: random.Random) -> str:
    """Return a text of random words, lines and marks, or one near to a constraint."""
    parts = []
    for _ in range(rng.randint(1, 5)):
        words = [rng.choice(WORDS) for _ in range(rng.randint(1, 9))]
        for _ in range(rng.randint(0, 2)):
            at = rng.randrange(len(words))
            mark = rng.choice(
                ("*{}*", "**{}**", "[{}]", '"{}"', "{},", "{}.", "{}!", "{}?", "({})", "<<{}>>", "{}:")
            )
            words[at] = mark.format(words[at])
        begin = rng.choice(
            ("", "", "", "* ", "- ", "1. ", "Section 1 ", "P.S. ", "P.P.S ", "SECTION 2\n", "So, ", '"So" ')
        )
        parts.append(begin + " ".join(words) + rng.choice(("", ".", ".", "!", "?", ". ")))
    text = rng.choice(("\n", "\n\n", "\n\n", " ", "\n***\n", "\n\n***\n\n", "******")).join(parts)
    near = rng.random()
    if near < 0.05:
        text = rng.choice(("My answer is yes.", "My answer is maybe.", "my answer is no.")) + rng.choice(
            ("", " ok")
        )
    elif near < 0.1:
        text = rng.choice(('{"a": [1, 2]}', '```json\n{"a": 1}\n```', "```\n[1]```", "{'a': 1}", '{"a": 1'))
    elif near < 0.15:
        text = rng.choice((REQUEST, REQUEST.lower(), "Sure. " + REQUEST)) + "\n" + text
    elif near < 0.2:
        text = text + rng.choice((" The end.", " the end.", ' The end."', " The end"))
    elif near < 0.25:
        text = f'"{text}"'
    elif near < 0.35:
        text = rng.choice(list(SENTENCES.values()))
    elif near < 0.4:
        text = (text + " the river is on that").upper()
    elif near < 0.45:
        text = (text + " the river is on that").lower()
    elif near < 0.47:
        text = rng.choice(("", " ", "\n"))
    return text


def random_arguments(kind: str, rng: random.Random) -> dict[str, Any]:
    """Return valid arguments of a kind."""
    relation, word = (
        rng.choice(("less than", "at least")),
        rng.choice(("sea", "the", "so", "river", "NASA", "in")),
    )
    few = rng.randint(1, 5)
    by_kind: dict[str, dict[str, Any]] = {
        "keywords:existence": {"keywords": rng.sample(["sea", "the", "of", "river"], 2)},
        "keywords:frequency": {"keyword": word, "frequency": few, "relation": relation},
        "keywords:forbidden_words": {"forbidden_words": rng.sample(["sea", "boat", "of", "river"], 2)},
        "keywords:letter_frequency": {"letter": rng.choice("aeQ"), "let_frequency": 5 * few, "let_relation": relation},
        "language:response_language": {"language": rng.choice(list(SENTENCES))},
        "length_constraints:number_sentences": {"num_sentences": few, "relation": relation},
        "length_constraints:number_paragraphs": {"num_paragraphs": few},
        "length_constraints:number_words": {"num_words": 6 * few, "relation": relation},
        "length_constraints:nth_paragraph_first_word": {
            "num_paragraphs": few, "nth_paragraph": rng.randint(1, few), "first_word": word,
        },
        "detectable_content:number_placeholders": {"num_placeholders": few},
        "detectable_content:postscript": {"postscript_marker": rng.choice(("P.S.", "P.P.S"))},
        "detectable_format:number_bullet_lists": {"num_bullets": few},
        "detectable_format:number_highlighted_sections": {"num_highlights": few},
        "detectable_format:multiple_sections": {
            "section_spliter": rng.choice(("Section", "SECTION")), "num_sections": 1 + few % 2,
        },
        "combination:repeat_prompt": {"prompt_to_repeat": REQUEST},
        "startend:end_checker": {"end_phrase": "The end."},
        "change_case:capital_word_frequency": {"capital_frequency": few, "capital_relation": relation},
    }  # fmt: skip
    return by_kind.get(kind, {})


def main() -> int:
    """Print agreement by kind and the JSON lines."""
    args = parse(
        __doc__,
        lambda p: (
            p.add_argument("--peer", action="append", default=[], metavar="lmeval=PYTHON"),
            p.add_argument("--texts", type=int, default=4000),
        ),
        smoke={"texts": 100},
    )
    found = interpreters(args.peer, ["lmeval"], 1)
    if not found:
        skip("needs lm-evaluation-harness (--peer lmeval=PYTHON)")
    rng = random.Random(0)
    cases = []
    for _ in range(args.texts):
        text = random_text(rng)
        cases += [(kind, random_arguments(kind, rng), text) for kind in CHECKS]
        language = next((k for k, v in SENTENCES.items() if v == text), None)
        if language:
            cases.append(("language:response_language", {"language": language}, text))
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "cases.json", Path(folder) / "out.json"
        given.write_text(json.dumps(cases))
        subprocess.run(
            [found["lmeval"], "-c", PEER, str(given), str(out)],
            check=True,
            env=environment(found["lmeval"], 1),
        )
        theirs = json.loads(out.read_text())
    agree: Counter[str] = Counter()
    n, held, examples = Counter[str](), Counter[str](), defaultdict(list)
    for (kind, arguments, text), peer in zip(cases, theirs, strict=True):
        constraint = read_constraints([{"kind": kind, **arguments}])[0]
        ours = [satisfies(constraint, text), satisfies(constraint, text, loose=True)]
        n[kind] += 2
        held[kind] += sum(ours)
        agree[kind] += sum(a == b for a, b in zip(ours, peer, strict=True))
        if ours != peer:
            examples[kind].append((arguments, text, ours, peer))
    for kind in CHECKS:
        print(
            f"{kind:<46} {n[kind]:>6} verdicts, {held[kind] / n[kind]:6.1%} satisfied, {agree[kind] / n[kind]:8.3%} agree"
        )
        for arguments, text, ours, peer in rng.sample(examples[kind], min(sized(3, 2), len(examples[kind]))):
            print(f"    {arguments} {text[:160]!r}: ours {ours}, peer {peer}")
    exact = [kind for kind in CHECKS if kind not in EXCEPT]
    lowest = min(agree[kind] / n[kind] for kind in exact)
    claim(
        f"{len(exact)} kinds of constraints with an exact definition: lowest share of equal verdicts of a kind",
        ours=lowest, peer=1.0, unit="share", ratio=lowest, bar=1.0, ok=lowest == 1.0, peer_name="lm-evaluation-harness",
        samples=[{"kind": kind, "agree": round(agree[kind] / n[kind], 5)} for kind in CHECKS],
    )  # fmt: skip
    others = sum(agree[kind] for kind in EXCEPT) / sum(n[kind] for kind in EXCEPT)
    claim(
        "kinds of constraints on languages, sentences and capital words: share of equal verdicts",
        ours=others, peer=1.0, unit="share", ratio=others, bar=0.9, ok=others >= 0.9, peer_name="lm-evaluation-harness",
        variant="own rules",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
