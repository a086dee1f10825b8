"""Natural language of a text: by its script, then by its function words (Grefenstette 1995, Comparing Two Language
Identification Schemes).

Function words are the most frequent words of a language, so they stay countable in pages that are half code or half
English terms. Scripts are counted in characters: one of Chinese or Japanese stands for about three letters. The words that
several languages share count less. A text without letters or function words has the language "".

English passages, names and commands are common in technical pages of other languages, and the reverse is rare. So a text
with more English function words than others has another language if that has a quarter of the English weight, and five
different words that English lacks. Of 948 English pages of Linux's documentation, none has that.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray

from whorl.corpus.measures.measure import Columns, Measure, Texts
from whorl.corpus.measures.scan import Hashes, Scan, scans, word_hash

FUNCTION_WORDS = {
    "en": "the of and to in is that for it with as was on are be this by at from or have an not which you "
    "can your has will if but they their its we all when more do about other than been would into "
    "there",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an "
    "werden aus er hat dass sie nach wird bei einer um am sind noch wie einem über einen oder zum war "
    "haben nur können wenn Sie zur diese dieser",
    "fr": "de la le et les des en un du une que est pour qui dans a par plus pas au sur ne se ce il sont "
    "avec vous être aux ou cette ces comme peut fait votre vos si leur mais nous dont été son sa ses "
    "elle même sans",
    "it": "di e il la che in un per è una del non con si da le dei come della i al nel sono gli alla più "
    "delle o ha anche dal questo lo ma essere se può questa su nella dalla degli sul agli viene ed "
    "uno stato",
    "es": "de la que el en y a los del se las por un para con no una su al lo como más pero sus le o este "
    "es si porque esta entre cuando muy sin sobre también hasta hay donde son puede desde todo está "
    "ser",
    "pt": "de a o que e do da em um para com não uma os no se na por mais as dos como mas ao das à seu sua "
    "ou quando muito nos já também só pelo pela até isso ela entre era são você pode está ser",
    "nl": "de van het een en in is dat op te zijn met voor niet aan er om ook als dan maar bij of uit nog "
    "naar wordt door die kan worden over deze hij tot geen meer wat heeft zich u",
    "sv": "och i att en som det är av för på den med till inte om har de ett kan från var så men vi eller "
    "när sin han jag du ska också där efter alla än detta",
    "da": "og i at det er en til af på for med ikke den som de der har kan et fra var om men eller vi når "
    "han så jeg også skal efter alle ud være blev denne",
    "no": "og i å det er en til av på for med ikke den som de har kan et fra var om men eller vi når han så "
    "jeg også skal etter alle ut være ble denne blir",
    "fi": "ja on ei että se oli hän ovat kun niin myös mutta tai joka kuin voi ole sen mukaan sekä olla jos "
    "jo vain ne tämä ollut hänen mitä jotka",
    "pl": "w i na z do się nie że to jest o jak po co za od dla przez oraz są tym tego ale być jego może "
    "był ich lub można tylko czy które który także",
    "cs": "a v se na je že s z do o k i to ve pro za by jsou jako po která nebo jeho však být od byl které "
    "který také při může jen tak",
    "sk": "a v sa na je že s z do o k aj to vo pre za by sú ako po ktorá alebo jeho však byť od bol ktoré "
    "ktorý tiež pri môže len tak",
    "ro": "și de în a la cu pe nu este un o din care că se pentru mai sau au fi prin sunt ca dar fost acest "
    "după poate această cele al",
    "hu": "a az és hogy nem is egy van de ha csak meg ez volt mint még el vagy már kell lehet azt ezt után "
    "majd minden között amely",
    "tr": "ve bir bu için ile da de olarak çok daha en olan gibi kadar sonra var ne o ya ise olduğu değil "
    "her veya ancak tarafından",
    "id": "yang dan di untuk dengan dari pada ini tidak dalam itu adalah akan ke atau juga dapat oleh anda "
    "sebagai ada telah bisa lebih mereka karena",
    "vi": "và của là có trong được cho không các một với những để này người khi đã về từ như ra hoặc nếu "
    "cũng trên thể",
    "ca": "de la i el que a en les els per un amb no una es del al com més o dels són aquest aquesta pot "
    "seva però ha si també ser",
    "ru": "и в не на что с как по это из для к у от а то же за его но был или так при если все она они "
    "можно только может",
    "uk": "і в не на що з як за до це та для у від або є його але був так при якщо все вона вони можна "
    "тільки може й також які який",
    "bg": "и в на да се не за от с е че по като са това до при или как но ще към може който които след през "
    "без само",
}
# Scripts that several languages share, and those of one language. The order is that of the numbers below.
SCRIPTS = {
    "Latin": r"\p{Latin}", "Cyrillic": r"\p{Cyrillic}", "zh": r"\p{Han}", "ja": r"[\p{Hiragana}\p{Katakana}]",
    "ko": r"\p{Hangul}", "el": r"\p{Greek}", "he": r"\p{Hebrew}", "ar": r"\p{Arabic}", "th": r"\p{Thai}",
    "hi": r"\p{Devanagari}", "bn": r"\p{Bengali}", "ta": r"\p{Tamil}", "te": r"\p{Telugu}", "ka": r"\p{Georgian}",
    "hy": r"\p{Armenian}",
}  # fmt: skip
LANGUAGES = tuple(FUNCTION_WORDS)
LETTERS_PER_CHARACTER = {"zh": 3.0, "ja": 3.0, "ko": 2.0}
MIN_SCRIPT = 0.15  # share of the letters that decides for a script other than Latin
MIN_KANA = 0.04  # of the Chinese and Japanese characters
MIN_BESIDE_ENGLISH = 0.25  # weight over that of English which decides against English
MIN_WORDS_BESIDE_ENGLISH = 5  # with so many different function words that English lacks
_BITS = 16


def measure_language(batch: Texts) -> Columns:
    """Return the language of each text (ISO 639-1, or "") and the share of its letters or words that shows it."""
    language, score = [""] * len(batch), np.zeros(len(batch))
    for indices, scan in scans(batch):
        script, share = _scripts(scan)
        words, word_share = _by_words(scan, script)
        for i, k in enumerate(indices):
            language[k] = words[i] if script[i] in ("Latin", "Cyrillic") else script[i]
            score[k] = word_share[i] if script[i] in ("Latin", "Cyrillic") else share[i]
    return {"text_language": language, "text_language_score": score}


def _scripts(scan: Scan) -> tuple[list[str], NDArray[np.float64]]:
    """Return the script of each text, or its only language, and its share of the letters."""
    names, n_texts = list(SCRIPTS), len(scan.texts)
    if scan.codes.dtype == np.uint8:
        return ["Latin"] * n_texts, np.ones(n_texts)
    scripts = _script_table()[scan.codes]
    text = np.repeat(np.arange(n_texts), scan.end - scan.begin + 1)
    counts = np.bincount(text * (len(names) + 1) + scripts, minlength=n_texts * (len(names) + 1))
    weights = [LETTERS_PER_CHARACTER.get(name, 1.0) for name in names]
    letters = counts.reshape(n_texts, -1)[:, 1:] * weights
    chinese, kana = names.index("zh"), names.index("ja")
    both = letters[:, chinese] + letters[:, kana]
    is_japanese = letters[:, kana] > MIN_KANA * both
    letters[:, kana], letters[:, chinese] = both * is_japanese, both * ~is_japanese
    letters /= np.maximum(letters.sum(axis=1, keepdims=True), 1)
    best = letters[:, 1:].argmax(axis=1) + 1
    best = np.where(letters[np.arange(n_texts), best] >= MIN_SCRIPT, best, 0)
    return [names[b] for b in best], letters[np.arange(n_texts), best].astype(np.float64)


def _by_words(scan: Scan, script: list[str]) -> tuple[list[str], NDArray[np.float64]]:
    """Return the language whose function words have the largest weight in each text, and their share of the words."""
    table, hashes, weights = _word_table()
    n_texts = len(scan.texts)
    entry = table[(scan.words & np.uint64((1 << _BITS) - 1)).astype(np.int64)]
    hits = np.flatnonzero(entry >= 0)
    hits = hits[hashes[entry[hits]] == scan.words[hits]]
    counts = np.bincount(
        scan.word_text[hits] * len(hashes) + entry[hits], minlength=n_texts * len(hashes)
    ).reshape(n_texts, -1)
    scores = counts @ weights  # [n_texts, languages]
    cyrillic = np.array([language in ("ru", "uk", "bg") for language in LANGUAGES])
    scores[np.array([s == "Cyrillic" for s in script])[:, None] != cyrillic] = 0
    best = _beside_english(counts, scores, weights)
    share = (counts @ (weights > 0))[np.arange(n_texts), best] / np.maximum(np.diff(scan.first_word), 1)
    found = scores[np.arange(n_texts), best] > 0
    return [LANGUAGES[b] if f else "" for b, f in zip(best, found, strict=True)], share * found


def _beside_english(
    counts: NDArray[np.int64], scores: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return the number of each text's language: the best score, or what English passages hide.

    Args:
        counts: [n_texts, n_words] of function words.
        scores: [n_texts, languages].
        weights: [n_words, languages].
    """
    english = LANGUAGES.index("en")
    best: NDArray[np.int64] = scores.argmax(axis=1)
    own = weights * (weights[:, [english]] == 0)
    texts = np.flatnonzero(best == english)
    others = counts[texts] @ own
    second = others.argmax(axis=1)
    different = ((counts[texts] > 0).astype(np.int64) @ (own > 0).astype(np.int64))[
        np.arange(len(texts)), second
    ]
    enough = others[np.arange(len(texts)), second] >= MIN_BESIDE_ENGLISH * scores[texts, english]
    best[texts] = np.where(enough & (different >= MIN_WORDS_BESIDE_ENGLISH), second, english)
    return best


@cache
def _script_table() -> NDArray[np.uint8]:
    """Return the number of each code point's script, from 1; 0 for all others."""
    everything = "".join(map(chr, range(0x110000)))
    table = np.zeros(len(everything), np.uint8)
    for number, pattern in enumerate(SCRIPTS.values(), start=1):
        for match in regex.finditer(f"{pattern}+", everything):
            table[match.start() : match.end()] = number
    return table


@cache
def _word_table() -> tuple[NDArray[np.int64], Hashes, NDArray[np.float64]]:
    """Return: index of a function word by the low bits of its hash, or -1; hashes; weights [n_words, languages]."""
    languages: dict[str, set[int]] = {}
    for number, words in enumerate(FUNCTION_WORDS.values()):
        for word in words.split():
            languages.setdefault(word, set()).add(number)
    hashes = np.array([word_hash(word) for word in languages], np.uint64)
    table = np.full(1 << _BITS, -1, np.int64)
    weights = np.zeros((len(hashes), len(FUNCTION_WORDS)))
    for i, (low, found) in enumerate(
        zip(hashes & np.uint64((1 << _BITS) - 1), languages.values(), strict=True)
    ):
        table[int(low)] = i  # of two words with equal bits, the later one counts
        weights[i, sorted(found)] = 1 / len(found)
    return table, hashes, weights


def language_of(text: str) -> str:
    """Return the language of one text, or ""."""
    found: Any = measure_language(Texts([text]))["text_language"]
    return str(found[0])


LANGUAGE = Measure(
    "language",
    2,
    "Grefenstette 1995, Comparing Two Language Identification Schemes",
    {"text_language": "string", "text_language_score": "float64"},
    lambda: measure_language,
)
