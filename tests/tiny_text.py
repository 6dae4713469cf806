"""A byte-level tokenizer trained on one sentence, and the files of it.

In: nothing.
Out: the tokenizer files of a directory; begin token 0, which is added in front of every text; VOCAB_SIZE ids.
"""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SENTENCE = "Once upon a time a cat sat on a mat, and the cat said: Once is not enough."
VOCAB_SIZE = 263  # the begin token, 256 bytes, 6 merges


def tokenizer_files() -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json, by name."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([SENTENCE], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "model_max_length": 64}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}
