"""Changes of the texts themselves: repeated lines and substrings removed, personal data masked, each change recorded."""

from whorl.corpus.rewriting.rewrite import RewriteConfig, edits_of, rewrite

__all__ = ["RewriteConfig", "edits_of", "rewrite"]
