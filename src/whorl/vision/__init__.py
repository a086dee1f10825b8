"""Image models in use: sets of images, training, evaluation, files. Networks are in `models/vision`.

config.py       settings, importable without torch
image_set.py    images with labels or captions as arrays, in splits
sources.py      makes a set from digits, files, or drawings.py and scenes.py, which draw
train.py        the tasks of the trainer: classification, CLIP, captions
evaluate.py     accuracy, recall@1, captions that are exactly right
model.py        a trained model with its classes, preprocessing and tokenizer: classify, caption, embed, save; load.py
"""
