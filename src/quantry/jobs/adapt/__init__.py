"""`quantry.adapt`: trains a LoRA or QLoRA adapter of a 16-bit model on chats or plain text.

| file | holds |
|---|---|
| adapt.py | `adapt`: the job from end to end |
| settings.py | options, their ranges and their defaults by model size |
| rows.py | data -> token ids, and which of them the loss is on |
| memory.py | what training needs, compared with what is free |
| base.py | the frozen model with an adapter on it, by peft |
| training.py | the loop, and the state that a killed job continues from |
| files.py | what is written: weights, peft's config, the record and the card |
| result.py | what the job returns |
"""
