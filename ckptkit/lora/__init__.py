"""Read, merge, check, convert and extract adapters such as LoRA, LoHa, LoKr and IA3.

The input is an adapter of peft, kohya, diffusers or ComfyUI, and a base of any format. The result
of a merge is the base with changed weights, which are computed during the write. The central class
is `merge.MergePlan`. Uses core, compute, quantized, rules, publish, edits, formats and api.
"""
