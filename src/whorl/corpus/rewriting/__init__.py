"""Changes of the texts themselves, each recorded: lines and substrings removed, personal data masked."""

from whorl.corpus.rewriting.rewrite import RewriteConfig, edits_of, rewrite

__all__ = ["RewriteConfig", "edits_of", "rewrite"]
