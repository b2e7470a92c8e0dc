"""Read, merge, check, convert and extract adapters such as LoRA, LoHa, LoKr and IA3.

The adapter has the layout of peft, kohya, diffusers or ComfyUI. The base may have any format. The
result of a merge is the base with changed weights. The weights are computed while ckptkit writes
the result. The central class is `merge.MergePlan`. Uses core,
compute, quantized, rules, publish, edits, formats and api.
"""
