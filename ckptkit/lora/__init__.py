"""Adapters (LoRA, LoHa, LoKr, IA3...): read, merged into a base, checked, converted, extracted.

In: an adapter of peft, kohya, diffusers or ComfyUI, and a base of any format. Out: the base with
changed weights, as byte ranges and operations. Start reading at `merge.MergePlan`. Uses core,
compute, quantized, rules, publish, edits, formats and api.
"""
