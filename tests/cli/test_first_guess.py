"""What people type first, in 64 jobs: it works, or the answer is the exact command to paste.

A job is what is typed in a folder of files of its own, and what must be in the answer: where that
is a command of ckptkit, it is run. `FINE` is the exit code of what works at once.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from ckptkit.cli import main
from tests.cli.conftest import Ckptkit
from tests.hints import commands_in

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self, classes=10, name="resnet50"):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.bn = torch.nn.BatchNorm2d(4)
        self.head = torch.nn.Linear(4, classes, bias=name != "resnet50")
"""
ANSWERED = "ckptkit "  # the answer begins with it; else what must be printed

# what is typed, what the answer is: printed text, or the command that is run next
JOBS = [
    # look
    ("net.pth", "9 tensors"),
    ("folder", "folder/1.pth"),
    ("run.pth --json", '"ckptkit.inspect/1"'),
    ("info net.pth", "ckptkit inspect net.pth"),
    ("ls net.pth", "ckptkit inspect net.pth"),
    ("summary net.pth", "ckptkit inspect --brief net.pth"),
    ("inspect -s net.pth", "ckptkit inspect --brief net.pth"),
    ("inspect net.pth --summary", "ckptkit inspect net.pth --brief"),
    ("size net.pth run.pth", "ckptkit inspect --brief net.pth run.pth"),
    ("inspect net.pth run.pth", "run.pth is"),
    ("inspect 'folder/*.pth'", "folder/2.pth"),
    ("inspect folder", "folder/2.pth"),
    ("inspect folder/01.pth", "folder/0.pth"),
    ("inspect org/model", "ckptkit inspect hf://org/model"),
    ("inspect -", "9 tensors"),
    ("doctor run.pth", "strip-module"),
    ("diagnose run.pth", "ckptkit doctor run.pth"),
    ("show net.pth", "ckptkit show net.pth conv.weight"),
    ("show net.pth head.wieght", "head.weight"),
    ("stats net.pth two.pth", "two.pth:"),
    # compare
    ("diff net.pth two.pth", "9 changed"),
    ("diff net.pth two.pth --flat --keys 'head*'", "head.weight"),
    ("compare net.pth two.pth", "ckptkit diff net.pth two.pth"),
    ("diff net.pth mynet.py:Net", "unexpected"),
    ("diff net.pth mynet.py:Net --arg name=resnet18", "equal: 9 keys (names and shapes)"),
    ("verify --nan nan.pth", "ckptkit verify --values nan.pth"),
    # change
    ("strip-module folder out", "ckptkit batch strip-module --into out 'folder/*.pth'"),
    ("strip-module folder/0.pth folder/1.pth folder/2.pth", "ckptkit batch strip-module --into out 'folder/*.pth'"),
    ("batch strip-module folder/0.pth folder/1.pth", "ckptkit batch strip-module folder/0.pth folder/1.pth --into out"),
    ("strip-module compiled.pth o.pth", "ckptkit strip-module --prefix _orig_mod. compiled.pth o.pth"),
    ("strip-module --prefix _orig_mod compiled.pth o.pth", "stripped '_orig_mod.' from 9 keys"),
    ("strip-module run.pth", "ckptkit strip-module run.pth run-new.pth"),
    ("strip-module run.pth -o o.pth", "ckptkit strip-module run.pth o.pth"),
    ("strip-module run.pth o.pth -f", "ckptkit strip-module run.pth o.pth --force"),
    ("remap net.pth o.pth", "ckptkit remap net.pth o.pth --to cpu"),
    ("remap net.pth o.pth --device cpu", "ckptkit remap net.pth o.pth --to cpu"),
    ("extract run.pth o.pth", "ckptkit extract run.pth o.pth --key model"),
    ("extract net.pth o.pth --drop head", "ckptkit convert net.pth o.pth --drop 'head*'"),
    ("convert net.pth o.pth --drop head", "ckptkit convert net.pth o.pth --drop 'head*'"),
    ("convert net.pth o.pth --half", "ckptkit convert net.pth o.pth --cast float16"),
    ("convert net.pth o.pth --dtype fp16", "ckptkit convert net.pth o.pth --cast fp16"),
    ("half net.pth o.pth", "ckptkit convert --cast float16 net.pth o.pth"),
    ("rename net.pth o.pth s/conv/c/", "ckptkit rename net.pth o.pth --sub conv=c"),
    ("rename net.pth o.pth --sub s/conv/c/", "ckptkit rename net.pth o.pth --sub conv=c"),
    ("rename net.pth o.pth --sub '(=x'", r"\( or \."),
    ("convert net.pth o.safetensors --overwrite", "ckptkit convert net.pth o.safetensors --force"),
    ("convert run.pth o.pth --key optimizer", "ckptkit extract run.pth o.pth --key optimizer"),
    ("convert net.pth outd/", "ckptkit convert net.pth outd.pth"),
    ("convert net.pth - --format safetensors", "wrote -: 9 tensors"),
    ("strip-module run.pth o.txt", "ckptkit strip-module run.pth o.pth"),
    ("shard net.pth outd", "ckptkit convert --shard-size 5GB net.pth outd"),
    ("quantize wide.safetensors q.safetensors", "ckptkit convert --quantize fp8-block wide.safetensors q.safetensors"),
    ("dtype net.pth o.pth", "ckptkit convert --cast float16 net.pth o.pth"),
    ("convert net.pth net.safetensors", "9 tensors"),
    # combine
    ("average net.pth two.pth -o o.pth", "ckptkit average net.pth two.pth o.pth"),
    ("sum net.pth two.pth o.pth", "ckptkit average net.pth two.pth o.pth"),
    ("ema ema.pth o.pth", "9 tensors"),
    # check
    ("nan nan.pth", "ckptkit verify --values nan.pth"),
    ("scan folder", "3 safe for weights_only"),
    ("verify folder", "folder/2.pth: ok"),
    ("checksum net.pth", "ckptkit digest net.pth"),
    ("recover cut.pth o.pth", "wrote o.pth"),
    # help
    ("man", "ckptkit help"),
    ("help lora", "lora"),
]  # fmt: skip
# More wrong inputs of newcomers, and the answers.
WRONG = [
    ("--brief net.pth", "9"),
    ("net.pth --brief --json", "--json, --names, --tree and --brief cannot be combined"),
    ("show conv.weight net.pth", "ckptkit show net.pth conv.weight"),
    ("inspect net.pth --keys", "see `ckptkit inspect --help`"),
    ("doctor run.pth -o o.pth", "ckptkit doctor run.pth --fix o.pth"),
    ("doctor --fix run.pth", "ckptkit doctor run.pth --fix run-fixed.pth"),
    ("doctor --fix run.pth o.pth", "ckptkit doctor --fix o.pth run.pth"),
    ("batch strip-module 'folder/*.pth' out", "ckptkit batch strip-module 'folder/*.pth' --into out"),
    ("batch strip-module folder --into out", "3 written"),
    ("inspect net.pth --json --fold", "remove --fold"),
    ("diff net.pth two.pth --json --fold", "remove --fold"),
    ("batch strip-modul folder/0.pth --into out", "ckptkit batch strip-module folder/0.pth --into out"),
    ("batch doctor 'folder/*.pth'", "ckptkit doctor 'folder/*.pth'"),
    ("remap folder/0.pth folder/1.pth folder/2.pth out", "ckptkit batch remap --to cpu --into out 'folder/*.pth'"),
    ("remap net.pth o.pth cuda:1 cpu", "ckptkit remap net.pth o.pth --device cuda:1=cpu"),
    ("average 'folder/*.pth' o.pth", "averaged 8 tensors of 3 checkpoints"),
    ("average folder o.pth", "ckptkit average 'folder/*' o.pth"),
    ("average net.pth two.pth", "ckptkit average net.pth two.pth net-new.pth"),
    ("extract run.pth model o.pth", "ckptkit extract run.pth --key model o.pth"),
    ("extract net.pth o.pth --keys 'conv*'", "ckptkit convert net.pth o.pth --keep 'conv*'"),
    ("strip-module run.pth module. o.pth", "ckptkit strip-module run.pth --prefix module. o.pth"),
    ("rename run.pth o.pth module. ''", r"ckptkit rename run.pth o.pth --sub '^module\.='"),
    ("convert net.pth safetensors", "ckptkit convert net.pth net-new.safetensors"),
    ("delta net.pth two.pth o", "ckptkit delta make net.pth two.pth o"),
    ("lora adapter.safetensors", "ckptkit lora check adapter.safetensors"),
    ("lora chek adapter.safetensors", "ckptkit lora check adapter.safetensors"),
    ("--keys 'conv*' net.pth", "conv.weight"),
    ("--keys x net.pth", "no tensor name or path matches --keys x"),
    ("inspect net.pth head", "ckptkit inspect net.pth --keys '*head*'"),
    ("inspect net.pth head.bias", "ckptkit inspect net.pth --keys head.bias"),
    ("inspect run.pth model", "ckptkit inspect run.pth --key model"),
    ("inspect run.pth optimizer", "ckptkit inspect run.pth --keys 'optimizer*'"),
    ("stats net.pth head", "ckptkit stats net.pth --keys '*head*'"),
    ("print net.pth head.bias", "ckptkit inspect net.pth --keys head.bias"),
    ("get net.pth head.bias", "ckptkit inspect net.pth --keys head.bias"),
    ("show net.pth --key head.bias", "ckptkit show net.pth head.bias"),
    ("digest net.pth o.manifest", "ckptkit digest net.pth --output o.manifest"),
    ("fix run.pth o.pth", "ckptkit doctor run.pth --fix o.pth"),
    ("run run.pth o.pth", "ckptkit run --list"),
    ("run run.pth", "ckptkit run --list"),
    ("delta make net.pth two.pth", "ckptkit delta make net.pth two.pth two-delta"),
    ("delta net.pth two.pth", "ckptkit delta make net.pth two.pth two-delta"),
    ("merge net.pth two.pth", "ckptkit merge net.pth two.pth net-new.pth --method linear"),
    ("merge net.pth two.pth o.pth", "ckptkit merge net.pth two.pth o.pth --method linear"),
    ("merge wide.safetensors lora", "ckptkit lora merge wide.safetensors lora wide-new.safetensors"),
    ("merge wide.safetensors lora o.safetensors", "ckptkit lora merge wide.safetensors lora o.safetensors"),
    ("lora merge wide.safetensors lora", "ckptkit lora merge wide.safetensors lora wide-new.safetensors"),
    ("join net.pth wide.safetensors", "ckptkit join net.pth wide.safetensors net-new.pth"),
    ("join net.pth two.pth", "--last-wins keeps the last tensor of each name"),
    ("diff net.pth", "ckptkit diff net.pth two.pth"),
    ("diff folder/0.pth", "ckptkit diff folder/0.pth folder/2.pth"),
    ("diff net.pth mynet.Net", "ckptkit diff net.pth mynet.py:Net"),
    ("check net.pth mynet.py:Net", "ckptkit diff net.pth mynet.py:Net"),
    ("check net.pth --model mynet.py:Net", "ckptkit diff net.pth --model mynet.py:Net"),
    ("doctor net.pth mynet.py:Net", "ckptkit doctor net.pth --model mynet.py:Net"),
    ("load-into net.pth mynet.py:Net", "ckptkit diff net.pth mynet.py:Net"),
    ("convert net.pth", "ckptkit convert net.pth net-new.pth"),
    ("convert net.pth --to safetensors", "ckptkit convert net.pth net-new.safetensors"),
    ("convert net.pth --format safetensors", "ckptkit convert net.pth --format safetensors net-new.safetensors"),
    ("to_safetensors net.pth", "ckptkit convert --format safetensors net.pth net-new.safetensors"),
    ("convert net.pth o.pth bf16", "ckptkit convert net.pth o.pth --cast bf16"),
    ("shard net.pth outd 2GB", "ckptkit convert --shard-size 2GB net.pth outd"),
    ("to cpu net.pth o.pth", "ckptkit remap --to cpu net.pth o.pth"),
    ("cpu net.pth o.pth", "ckptkit remap --to cpu net.pth o.pth"),
    ("convert run.pth o.pth --no-optimizer", "ckptkit extract run.pth o.pth --key model"),
    ("convert run.pth o.pth --drop optimizer", "ckptkit extract run.pth o.pth --key model"),
    ("strip-optimizer run.pth o.pth", "ckptkit extract run.pth o.pth --key model"),
    ("strip-prefix run.pth o.pth module.", "ckptkit strip-module run.pth o.pth --prefix module."),
    ("convert run.pth o.pth --strip-prefix module.", "ckptkit convert run.pth o.pth --strip module."),
    ("rename net.pth o.pth conv=c", "ckptkit rename net.pth o.pth --sub conv=c"),
    ("rename net.pth o.pth --sub conv c", "ckptkit rename net.pth o.pth --sub conv=c"),
    ("sed s/conv/c/ net.pth o.pth", "ckptkit rename --sub conv=c net.pth o.pth"),
    ("rename-keys net.pth o.pth s/conv/c/g", "ckptkit rename net.pth o.pth --sub conv=c"),
    ("extract ema.pth o.pth ema", "ckptkit extract ema.pth o.pth --key model_ema"),
    ("extract ema.pth o.pth --ema", "ckptkit ema ema.pth o.pth"),
    ("wrap net.pth o.pth", "ckptkit wrap net.pth o.pth --key model"),
    ("wrap net.pth o.pth state_dict", "ckptkit wrap net.pth o.pth --key state_dict"),
    ("inspect net.pth --list", "ckptkit inspect net.pth --names"),
    ("inspect net.pth --shapes", "ckptkit inspect net.pth --flat"),
    ("diff net.pth two.pth --tolerance 1e-3", "ckptkit diff net.pth two.pth --atol 1e-3"),
    ("batch convert 'folder/*.pth' --format safetensors", "ckptkit batch convert 'folder/*.pth' --format safetensors --into out"),
    # merge, deltas, vocabularies
    ("slerp math.safetensors code.safetensors o.safetensors", "ckptkit merge --method slerp math.safetensors code.safetensors o.safetensors"),
    ("merge math.safetensors code.safetensors o.safetensors --slerp 0.3", "ckptkit merge math.safetensors code.safetensors o.safetensors --method slerp --scale 0.3"),
    ("merge llama.safetensors math.safetensors code.safetensors o.safetensors --ties", "ckptkit merge --base llama.safetensors math.safetensors code.safetensors o.safetensors --method ties"),
    ("merge math.safetensors code.safetensors o.safetensors --base llama.safetensors --method dare_ties", "ckptkit merge math.safetensors code.safetensors o.safetensors --base llama.safetensors --method dare-ties"),
    ("merge math.safetensors code.safetensors o.safetensors --base llama.safetensors --method ties --density 0.5", "ckptkit merge math.safetensors code.safetensors o.safetensors --base llama.safetensors --method ties --density 0.5 --density 0.5"),
    ("merge math.safetensors code.safetensors o.safetensors --weights 0.7 0.3", "ckptkit merge math.safetensors code.safetensors o.safetensors --weight 0.7 --weight 0.3 --method linear"),
    ("average math.safetensors code.safetensors o.safetensors --weights 0.7,0.3", "ckptkit average math.safetensors code.safetensors o.safetensors --weight 0.7 --weight 0.3"),
    ("average math.safetensors:0.7 code.safetensors:0.3 o.safetensors", "ckptkit average math.safetensors code.safetensors o.safetensors --weight 0.7 --weight 0.3"),
    ("merge math.safetensors code.safetensors o.safetensors --alpha 0.3", "ckptkit merge math.safetensors code.safetensors o.safetensors --method linear --weight 0.7 --weight 0.3"),
    ("merge merge.yml outd", "ckptkit run merge.yml . outd"),
    ("run merge.yml outd", "ckptkit run merge.yml . outd"),
    ("run", "ckptkit run --list"),
    ("run shards", "ckptkit run --list"),
    ("merge shards o.safetensors", "ckptkit convert shards o.safetensors"),
    ("merge shards/model-00001-of-00002.safetensors shards/model-00002-of-00002.safetensors o.safetensors", "ckptkit join shards/model-00001-of-00002.safetensors shards/model-00002-of-00002.safetensors o.safetensors"),
    ("shard net.pth outd --size 5KB", "ckptkit convert net.pth outd --shard-size 5KB"),
    ("shard net.pth outd 5GB", "ckptkit convert --shard-size 5GB net.pth outd"),
    ("delta create math.safetensors code.safetensors d", "ckptkit delta make math.safetensors code.safetensors d"),
    ("delta diff math.safetensors code.safetensors d", "ckptkit delta make math.safetensors code.safetensors d"),
    ("diff math.safetensors code.safetensors --save d", "ckptkit delta make math.safetensors code.safetensors d"),
    ("delta verify math.safetensors", "ckptkit verify math.safetensors"),
    ("resize llama.safetensors o.safetensors 9", "ckptkit resize llama.safetensors o.safetensors --rows 9 --keys lm_head.weight --keys model.embed_tokens.weight"),
    ("resize llama.safetensors 9 o.safetensors", "ckptkit resize llama.safetensors --rows 9 o.safetensors --keys lm_head.weight --keys model.embed_tokens.weight"),
    ("resize-vocab llama.safetensors o.safetensors --vocab-size 9", "ckptkit resize llama.safetensors o.safetensors --rows 9 --keys lm_head.weight --keys model.embed_tokens.weight"),
    ("resize llama.safetensors o.safetensors --pad-to-multiple-of 6", "ckptkit resize llama.safetensors o.safetensors --rows 12 --keys lm_head.weight --keys model.embed_tokens.weight"),
    ("pad llama.safetensors o.safetensors --multiple=6", "ckptkit resize llama.safetensors o.safetensors --rows 12 --keys lm_head.weight --keys model.embed_tokens.weight"),
    # adapters
    ("lora merge lora --base wide.safetensors -o o.safetensors", "ckptkit lora merge wide.safetensors lora o.safetensors"),
    ("lora merge lora wide.safetensors o.safetensors", "ckptkit lora merge wide.safetensors lora o.safetensors"),
    ("lora merge wide.safetensors lora:0.5 o.safetensors", "ckptkit lora merge wide.safetensors lora o.safetensors --weight 0.5"),
    ("lora unmerge wide.safetensors lora o.safetensors", "ckptkit lora merge --weight -1 wide.safetensors lora o.safetensors"),
    ("lora merge wide.safetensors lora lora o.safetensors --scale 0.5", "ckptkit lora merge wide.safetensors lora lora o.safetensors --weight 0.5 --weight 0.5"),
    ("lora check lora wide.safetensors", "ckptkit lora check lora --base wide.safetensors"),
    ("doctor lora --base wide.safetensors", "ckptkit lora check lora --base wide.safetensors"),
    ("lora resize lora 1 outd", "ckptkit lora resize lora --rank 1 outd"),
    ("lora resize lora outd -r 1", "ckptkit lora resize lora outd --rank 1"),
    ("resize lora outd --rank 1", "ckptkit lora resize lora outd --rank 1"),
    ("lora convert lora diffusers o.safetensors", "ckptkit lora convert lora --to diffusers o.safetensors"),
    ("lora convert lora o.safetensors --format diffusers", "ckptkit lora convert lora o.safetensors --to diffusers"),
    ("convert lora o.safetensors --to diffusers", "ckptkit lora convert lora o.safetensors --to diffusers"),
    ("lora convert lora outd --dtype fp16", "ckptkit convert lora outd --cast fp16"),
    ("lora extract math.safetensors code.safetensors d.safetensors --rank 2", "ckptkit lora extract math.safetensors code.safetensors d --rank 2"),
    ("extract-lora math.safetensors code.safetensors d", "ckptkit lora extract math.safetensors code.safetensors d --rank 16"),
    ("lora info lora", "ckptkit inspect lora"),
    # other words and values
    ("drop net.pth o.pth 'head*'", "ckptkit convert net.pth o.pth --drop 'head*'"),
    ("convert run.pth o.pth --drop 'optimizer.*'", "ckptkit extract run.pth o.pth --key model"),
    ("convert net.pth o.pth --keep bias", "ckptkit convert net.pth o.pth --keep '*bias*'"),
    ("convert net.pth o.pth --to bf16", "ckptkit convert net.pth o.pth --cast bf16"),
    ("convert net.pth outd --to dcp", "ckptkit convert net.pth outd --format dcp"),
    ("cast net.pth o.pth --dtype bf16", "ckptkit convert net.pth o.pth --cast bf16"),
    ("remap net.pth o.pth cuda:1=cpu", "ckptkit remap net.pth o.pth --device cuda:1=cpu"),
    ("rename net.pth o.pth --from conv --to c", "ckptkit rename net.pth o.pth --sub conv=c"),
    ("rename run.pth o.pth --from module. --to net.", r"ckptkit rename run.pth o.pth --sub '^module\.=net.'"),
    ("rename net.pth o.pth conv c", "ckptkit rename net.pth o.pth --sub conv=c"),
    ("rename net.pth o.safetensors", "ckptkit convert net.pth o.safetensors"),
    ("gguf inspect net.pth", "ckptkit inspect net.pth"),
    ("show run.pth optimizer", "ckptkit inspect run.pth --keys 'optimizer*'"),
    ("scan net.pth --fix o.pth", "ckptkit convert net.pth --objects drop o.pth"),
    ("convert net.pth o.safetensors --untie", "writes tied tensors twice"),
    ("run nothing net.pth o.pth", "there is no recipe"),
    ("batch convert folder/0.pth --to safetensors", "ckptkit batch convert folder/0.pth --format safetensors --into out"),
    ("batch convert folder outd --suffix .safetensors", "ckptkit batch convert folder --into outd --format safetensors"),
    ("run lightning net.pth o.pth", "ckptkit doctor net.pth --fix o.pth"),
    ("diff net.pth Net", "ckptkit diff net.pth mynet.py:Net"),
    ("diff net.pth word", "ckptkit diff net.pth two.pth"),
    ("diff net.pth two.pth run.pth", "ckptkit diff net.pth two.pth"),
    ("diff net.pth mynet.py:Net --classes 5", "ckptkit diff net.pth mynet.py:Net --arg classes=5"),
    ("diff run.pth net.pth --optimizer", "ckptkit diff run.pth net.pth --all"),
    ("convert net.pth o.pth --legacy", "_use_new_zipfile_serialization=False"),
    ("set run.pth epoch 4", "with_value("),
    ("inspect net.pth -f", "convert has --force: see `ckptkit convert --help`"),
    # options with another name here
    ("remap net.pth o.pth --map cuda:1=cpu", "ckptkit remap net.pth o.pth --device cuda:1=cpu"),
    ("convert net.pth o.pth --device-map cuda:1=cpu", "ckptkit convert net.pth o.pth --device cuda:1=cpu"),
    ("remap net.pth o.pth --to cpu --values", "ckptkit remap net.pth o.pth --to cpu --device-values"),
    ("convert run.pth o.pth --prefix module.", "ckptkit convert run.pth o.pth --strip module."),
    ("strip-module run.pth o.pth --strip module.", "ckptkit strip-module run.pth o.pth --prefix module."),
    ("convert net.pth o.pth --keys 'conv*'", "ckptkit convert net.pth o.pth --keep 'conv*'"),
    ("add-module net.pth o.pth --add x.", "ckptkit add-module net.pth o.pth --prefix x."),
    ("digest net.pth --manifest o.manifest", "ckptkit digest net.pth --output o.manifest"),
    # what is nearest
    ("inspekt net.pth", "ckptkit inspect net.pth"),
    ("inspekt none.pth", "hint: did you mean inspect? see `ckptkit --help`\n"),
    ("stat net.pth", "ckptkit stats net.pth"),
    ("dif net.pth two.pth", "ckptkit diff net.pth two.pth"),
    ("strip run.pth o.pth", "ckptkit strip-module run.pth o.pth"),
    ("xyzzy", "error: No such command 'xyzzy'.\nhint: see `ckptkit --help`\n"),
    ("inspect --jsn none.pth", "use --json: see"),
    ("extract run.pth o.pth --key modle", "hint: did you mean model? the entries are: model, optimizer,"),
    ("extract run.pth o.pth --key Model", "hint: did you mean model? the entries are: model, optimizer,"),
    ("convert net.pth o.pth --cast bfloat17", "hint: did you mean bfloat16, "),
    ("doctor folder/1.pht", "did you mean folder/1.pth"),
    ("inspect 'none/*.pth'", "no file matches this pattern"),
    ("doctor 'none/*.pth'", "no file matches this pattern"),
    # next steps
    ("convert run.pth o.pth --key optimizer", "`ckptkit inspect --tree run.pth` shows"),
    ("ema run.pth o.pth", "ckptkit inspect --tree run.pth"),
    ("rename run.pth o.pth --sub 's/conv(.weight)/c/g'", "ckptkit rename run.pth o.pth --sub 'conv(.weight)=c'"),
    ("rename run.pth o.pth --map map.json", "the keys are: module.conv.weight"),
    ("rename run.pth o.pth --sub weight=bias", "ckptkit convert run.pth run-new.pth --drop module.conv.weight"),
    ("convert run.pth o.pth --drop zzzz", "the weights are: module.conv.weight"),
    ("run lightning run.pth o.pth", "the entries are: "),
    ("diff run.pth --model a.py:B --arg name={", "'name=\"{\"'"),
    ("average net.pth wide.safetensors o.pth", "ckptkit join net.pth wide.safetensors o.pth"),
    ("completion", "Choose from: bash, zsh, fish\n"),
    # several files
    ("strip-module folder/0.pth folder/1.pth new", "ckptkit batch strip-module --into new folder/0.pth folder/1.pth"),
    ("strip-module 'a b' new", "ckptkit batch strip-module --into new 'a b/*.pth'"),
    ("run strip.toml folder new --dry-run", "ckptkit batch run strip.toml --dry-run --into new 'folder/*.pth'"),
    ("convert --format safetensors 'folder/*.pth' new", "ckptkit batch convert --format safetensors --into new 'folder/*.pth'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's own files."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("files")
    with chdir(folder):
        Path("mynet.py").write_text(MODEL)
        space: dict[str, type[torch.nn.Module]] = {}
        exec(MODEL, space)
        net = space["Net"](name="resnet18")
        state = {name: value.clone() for name, value in net.state_dict().items()}
        optimizer = torch.optim.AdamW(net.parameters())
        sum(parameter.sum() for parameter in net.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        torch.save(state, "net.pth")
        torch.save({name: value + 1 for name, value in state.items()}, "two.pth")
        wrapped = {f"module.{name}": value for name, value in state.items()}
        torch.save({"model": wrapped, "optimizer": optimizer.state_dict(), "epoch": 3}, "run.pth")
        torch.save({f"_orig_mod.{name}": value for name, value in state.items()}, "compiled.pth")
        torch.save({"model": state, "model_ema": {"module": state, "decay": 0.9}}, "ema.pth")
        torch.save({**state, "head.bias": torch.full((10,), float("nan"))}, "nan.pth")
        save_file({"mlp.weight": torch.ones(256, 128)}, "wide.safetensors")
        adapter = {"lora_A": torch.ones(2, 128), "lora_B": torch.ones(256, 2)}
        save_file(
            {f"base_model.model.mlp.{name}.weight": value for name, value in adapter.items()},
            "adapter.safetensors",
        )
        Path("lora").mkdir()
        shutil.copy("adapter.safetensors", "lora/adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
        Path("lora/adapter_config.json").write_text(json.dumps(config))
        model = {
            "model.embed_tokens.weight": torch.randn(8, 4),
            "lm_head.weight": torch.randn(8, 4),
        }
        for name in ("llama", "math", "code"):
            changed = {key: value + 0.1 * torch.randn(8, 4) for key, value in model.items()}
            save_file(changed, f"{name}.safetensors")
        Path("merge.yml").write_text(
            "merge_method: linear\nmodels:\n- model: math.safetensors\n- model: code.safetensors\n"
        )
        Path("shards").mkdir()
        places = {}
        for number, (key, value) in enumerate(model.items(), 1):
            places[key] = f"model-{number:05}-of-00002.safetensors"
            save_file({key: value}, f"shards/{places[key]}")
        index = json.dumps({"metadata": {}, "weight_map": places})
        Path("shards/model.safetensors.index.json").write_text(index)
        Path("split").mkdir()
        Path("cut.pth").write_bytes(Path("net.pth").read_bytes()[:-1300])
        Path("folder").mkdir()
        for number in range(3):
            torch.save(wrapped, f"folder/{number}.pth")
        shutil.copytree("folder", "a b")
        Path("map.json").write_text('{"zzzz": "x"}')
        Path("strip.toml").write_text('[[steps]]\nstrip = "module."\n')
    return folder


@pytest.fixture
def here(files: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the user's files, which is the working directory."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    with chdir(tmp_path):
        yield tmp_path


def test_there_are_64() -> None:
    assert len(JOBS) == 64 and len({typed for typed, _ in JOBS}) == 64


@pytest.mark.parametrize(
    ("typed", "answer"), JOBS + WRONG, ids=[typed for typed, _ in JOBS + WRONG]
)
def test_jobs(
    typed: str, answer: str, here: Path, ckptkit: Ckptkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "hf://" in answer:  # there is no network to replay it
        monkeypatch.delenv("CKPTKIT_HINTS", raising=False)
    done = CliRunner().invoke(main, shlex.split(typed), input=Path("net.pth").read_bytes())
    said = f"{done.stdout}\n{done.stderr}"
    if not answer.startswith(ANSWERED):
        assert answer in said, said
        return
    commands = commands_in(said)
    assert shlex.split(answer) in commands, said
    if "hf://" in answer:
        return
    again = ckptkit(*shlex.split(answer)[1:])
    assert again.exit_code in (0, 1), again.stderr
