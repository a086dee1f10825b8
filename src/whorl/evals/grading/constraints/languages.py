"""The language of an answer: `corpus.measures.language`, and further languages of IFEval's data.

Hindi, Marathi and Nepali share a script and differ in function words. Arabic, Persian and Urdu differ in letters that only
one of them uses. Swahili is recognized by its function words.
"""

from __future__ import annotations

import re

import regex

from whorl.corpus.measures.language import FUNCTION_WORDS, language_of

# Scripts of one language that the corpus measure does not have.
SCRIPTS = {"kn": "Kannada", "gu": "Gujarati", "pa": "Gurmukhi", "ml": "Malayalam"}
MORE_WORDS = {
    "hi": "है हैं का के की में से को और पर यह एक नहीं कि हम ने भी था थे लिए",
    "mr": "आहे आहेत आणि या तो ते हे मी आम्ही नाही मध्ये साठी होते च्या ची चे एक पण असे करून",
    "ne": "छ छन् हो र मा को का लाई पनि यो एक गर्न भएको हुन्छ थियो हामी तर लागि गरेको",
    "sw": "na ya wa kwa ni katika za la kuwa hii pia au kama hiyo sana yake yao ambayo hivyo lakini wao cha huu",
}
LANGUAGES = frozenset(FUNCTION_WORDS) | frozenset(MORE_WORDS) | frozenset(SCRIPTS) | frozenset(
    ("zh", "ja", "ko", "el", "he", "ar", "fa", "ur", "th", "bn", "ta", "te", "ka", "hy")
)  # fmt: skip
_PERSIAN, _URDU = re.compile("[پچژگ]"), re.compile("[ٹڈڑےںھ]")
_COMMON = frozenset(FUNCTION_WORDS["en"].split())


def detect_language(text: str) -> str:
    """Return the language of a text (ISO 639-1), or "" if none is known."""
    letters = len(regex.findall(r"\p{L}", text))
    if not letters:
        return ""
    for language, script in SCRIPTS.items():
        if len(regex.findall(rf"\p{{{script}}}", text)) > letters / 2:
            return language
    # Case matters to the corpus measure only where a word has no other form.
    found = language_of(text.lower())
    if found == "hi":
        return _by_words(text, ("hi", "mr", "ne")) or "hi"
    if found == "ar":
        if _URDU.search(text):
            return "ur"
        return "fa" if _PERSIAN.search(text) else "ar"
    if _hits(text, "sw") > _hits_of(text, frozenset(FUNCTION_WORDS.get(found, "").split())):
        return "sw"
    return found


def may_be_english(text: str) -> bool:
    """Return whether a text is English, or too short to have function words and in ASCII letters."""
    found = detect_language(text)
    if found in ("en", ""):
        return bool(regex.search(r"\p{Latin}", text)) and (
            found == "en" or not regex.search(r"[^\p{ASCII}\W]", text)
        )
    # A few words that several languages share decide nothing against English ones.
    return _hits_of(text, _COMMON) >= _hits_of(text, frozenset(FUNCTION_WORDS.get(found, "").split())) > 0


def _by_words(text: str, languages: tuple[str, ...]) -> str:
    hits = {language: _hits(text, language) for language in languages}
    best = max(languages, key=lambda language: hits[language])
    return best if hits[best] else ""


def _hits(text: str, language: str) -> int:
    return _hits_of(text, frozenset(MORE_WORDS[language].split()))


def _hits_of(text: str, words: frozenset[str]) -> int:
    return sum(word in words for word in regex.findall(r"[\p{L}\p{M}]+", text.lower()))
