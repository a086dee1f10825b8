"""One file per family of generative models; `registration.py` lists them."""
