"""Model families whose weights are exchanged with Hugging Face, one file per group."""

from whorl.models.exchange.families.deepseek import DEEPSEEK
from whorl.models.exchange.families.experts import MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from whorl.models.exchange.families.gemma import GEMMA, GEMMA2, GEMMA3
from whorl.models.exchange.families.gpt2 import GPT2
from whorl.models.exchange.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from whorl.models.exchange.families.llama_variants import GRANITE, OLMO2, PHI3, SMOLLM3
from whorl.models.exchange.families.whorl_decoder import WHORL_DECODER

# In this order, export takes the first family that fits.
LANGUAGE_FAMILIES = (
    GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, SMOLLM3, GRANITE, OLMO2, GEMMA, GEMMA2, GEMMA3, MIXTRAL, QWEN2_MOE, QWEN3_MOE,
    OLMOE, DEEPSEEK, WHORL_DECODER,
)  # fmt: skip
