"""Adapters (LoRA, LoHa, LoKr, IA3...): read, merged into a base, checked, converted, extracted.

In: an adapter of peft, kohya, diffusers or ComfyUI, and a base of any format. Out: the base with
changed weights, as byte ranges and operations. Start at `merge`: `MergePlan` pairs the modules of
an adapter with the tensors of a base. Uses core, compute, quantized, rules, publish, edits, formats
and api.
"""
