"""A checkpoint in several files, mostly with an index, as on the Hugging Face hub.

    model.safetensors.index.json | pytorch_model.bin.index.json
        {"metadata": {"total_size": bytes, ...}, "weight_map": {tensor name: file name}}
    model-00001-of-00003.safetensors | pytorch_model-00001-of-00003.bin

:mod:`shards` reads both kinds; :mod:`safetensors_shards` and :mod:`torch_shards` are the two
formats; :mod:`split` chooses the file of each tensor.
"""
