"""Classes that a checkpoint may hold as objects or by name, and functions by name. Data only.

An object of these classes is made through ``__new__`` and given its state; then code of its package
runs (``__setstate__``, ``__setattr__``, ``__hash__``), which nothing here reads. Most of it was
looked at in torch 2.13 and in releases of 2026, and sets attributes; not every class, and no other
release. The hunt (``tests/fuzz/soundness.py``) makes objects of those that are installed. Left out
for what they do: datapipes and their wrappers (unpickle, iterate), DistributedDataParallel (talks
to the process group), graph modules (compile), iterators of loaders.
"""

from __future__ import annotations

from ckptkit.pickles.allowlist.rows import names_in

_LISTED = {
    "accelerate.state": "PartialState",
    "accelerate.utils.dataclasses": "DeepSpeedPlugin FullyShardedDataParallelPlugin",
    "ckptkit.trainer.models.cnn": "Cnn",
    "deepspeed.runtime.fp16.loss_scaler": "DynamicLossScaler LossScaler",
    "deepspeed.utils.tensor_fragment": "fragment_address tensor_fragment",
    "gym.spaces.box": "Box",
    "gym.spaces.discrete": "Discrete",
    "gymnasium.spaces.box": "Box",
    "gymnasium.spaces.discrete": "Discrete",
    "lightning_fabric.utilities.data": "AttributeDict",
    "lightning.fabric.utilities.data": "AttributeDict",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    "omegaconf.base": "ContainerMetadata Metadata",
    "omegaconf.dictconfig": "DictConfig",
    "omegaconf.listconfig": "ListConfig",
    "omegaconf.nodes": (
        "AnyNode BooleanNode BytesNode EnumNode FloatNode IntegerNode PathNode StringNode"
    ),
    "pytorch_lightning.callbacks.early_stopping": "EarlyStopping",
    "pytorch_lightning.callbacks.model_checkpoint": "ModelCheckpoint",
    "pytorch_lightning.utilities.parsing": "AttributeDict",
    "tensordict._td": "TensorDict",
    "tensordict.nn.params": "TensorDictParams",
    "tensordict.tensorclass": "NonTensorData",
    "tensordict.tensordict": "TensorDict",
    "torch.ao.nn.intrinsic.modules.fused": (
        "BNReLU2d BNReLU3d ConvAdd2d ConvAddReLU2d ConvBn1d ConvBn2d ConvBn3d ConvBnReLU1d "
        "ConvBnReLU2d ConvBnReLU3d ConvReLU1d ConvReLU2d ConvReLU3d LinearBn1d LinearLeakyReLU "
        "LinearReLU LinearTanh _FusedModule"
    ),
    "torch.ao.nn.intrinsic.qat.modules.conv_fused": (
        "ConvBn1d ConvBn2d ConvBn3d ConvBnReLU1d ConvBnReLU2d ConvBnReLU3d ConvReLU1d ConvReLU2d "
        "ConvReLU3d _ConvBnNd"
    ),
    "torch.ao.nn.intrinsic.qat.modules.linear_fused": "LinearBn1d",
    "torch.ao.nn.intrinsic.qat.modules.linear_relu": "LinearReLU",
    "torch.ao.nn.intrinsic.quantized.dynamic.modules.linear_relu": "LinearReLU",
    "torch.ao.nn.intrinsic.quantized.modules.bn_relu": "BNReLU2d BNReLU3d",
    "torch.ao.nn.intrinsic.quantized.modules.conv_add": "ConvAdd2d ConvAddReLU2d",
    "torch.ao.nn.intrinsic.quantized.modules.conv_relu": "ConvReLU1d ConvReLU2d ConvReLU3d",
    "torch.ao.nn.intrinsic.quantized.modules.linear_relu": "LinearLeakyReLU LinearReLU LinearTanh",
    "torch.ao.nn.qat.dynamic.modules.linear": "Linear",
    "torch.ao.nn.qat.modules.conv": "Conv1d Conv2d Conv3d _ConvNd",
    "torch.ao.nn.qat.modules.embedding_ops": "Embedding EmbeddingBag",
    "torch.ao.nn.qat.modules.linear": "Linear",
    "torch.ao.nn.quantizable.modules.activation": "MultiheadAttention",
    "torch.ao.nn.quantizable.modules.rnn": "LSTM LSTMCell _LSTMLayer _LSTMSingleLayer",
    "torch.ao.nn.quantized.dynamic.modules.conv": (
        "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d"
    ),
    "torch.ao.nn.quantized.dynamic.modules.linear": "Linear",
    "torch.ao.nn.quantized.dynamic.modules.rnn": (
        "GRU GRUCell LSTM LSTMCell PackedParameter RNNBase RNNCell RNNCellBase"
    ),
    "torch.ao.nn.quantized.modules": "DeQuantize Quantize",
    "torch.ao.nn.quantized.modules.activation": (
        "ELU Hardswish LeakyReLU MultiheadAttention PReLU ReLU6 Sigmoid Softmax"
    ),
    "torch.ao.nn.quantized.modules.batchnorm": "BatchNorm2d BatchNorm3d _BatchNorm",
    "torch.ao.nn.quantized.modules.conv": (
        "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d _ConvNd "
        "_ConvTransposeNd"
    ),
    "torch.ao.nn.quantized.modules.dropout": "Dropout",
    "torch.ao.nn.quantized.modules.embedding_ops": "Embedding EmbeddingBag EmbeddingPackedParams",
    "torch.ao.nn.quantized.modules.functional_modules": (
        "FXFloatFunctional FloatFunctional QFunctional"
    ),
    "torch.ao.nn.quantized.modules.linear": "Linear LinearPackedParams",
    "torch.ao.nn.quantized.modules.normalization": (
        "GroupNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d LayerNorm"
    ),
    "torch.ao.nn.quantized.modules.rnn": "LSTM",
    "torch.ao.nn.quantized.modules.utils": "WeightedQuantizedModule",
    "torch.ao.nn.quantized.reference.modules.conv": (
        "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d _ConvNd "
        "_ConvTransposeNd"
    ),
    "torch.ao.nn.quantized.reference.modules.linear": "Linear",
    "torch.ao.nn.quantized.reference.modules.rnn": (
        "GRU GRUCell LSTM LSTMCell RNNBase RNNCell RNNCellBase"
    ),
    "torch.ao.nn.quantized.reference.modules.sparse": "Embedding EmbeddingBag",
    "torch.ao.nn.quantized.reference.modules.utils": "ReferenceQuantizedModule",
    "torch.ao.nn.sparse.quantized.dynamic.linear": "Linear",
    "torch.ao.nn.sparse.quantized.linear": "Linear LinearPackedParams",
    "torch.ao.nn.sparse.quantized.utils": "LinearBlockSparsePattern",
    "torch.ao.quantization._learnable_fake_quantize": "_LearnableFakeQuantize",
    "torch.ao.quantization.fake_quantize": (
        "FakeQuantize FakeQuantizeBase FixedQParamsFakeQuantize FusedMovingAvgObsFakeQuantize"
    ),
    "torch.ao.quantization.observer": (
        "AffineQuantizedObserverBase FixedQParamsObserver HistogramObserver MinMaxObserver "
        "MovingAverageMinMaxObserver MovingAveragePerChannelMinMaxObserver NoopObserver "
        "ObserverBase PerAxis PerBlock PerChannelMinMaxObserver PerGroup PerRow PerTensor "
        "PerToken PlaceholderObserver RecordingObserver ReuseInputObserver "
        "UniformQuantizationObserverBase _PartialWrapper"
    ),
    "torch.ao.quantization.stubs": "DeQuantStub QuantStub QuantWrapper",
    "torch.distributed._mesh_layout": "_FlatLayout _MeshLayout",
    "torch.distributed._shard.metadata": "ShardMetadata",
    "torch.distributed._shard.sharded_tensor.api": (
        "ShardedTensor ShardedTensor.ProcessGroupState ShardedTensorBase"
    ),
    "torch.distributed._shard.sharded_tensor.metadata": "ShardedTensorMetadata TensorProperties",
    "torch.distributed._shard.sharded_tensor.shard": "Shard",
    "torch.distributed._shard.sharding_spec.api": (
        "DevicePlacementSpec EnumerableShardingSpec PlacementSpec ShardingSpec"
    ),
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
        "TensorProperties TensorStorageMetadata"
    ),
    "torch.distributed.checkpoint.planner": (
        "BytesIOWriteData LoadPlan ReadItem SavePlan TensorWriteData WriteItem"
    ),
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed.tensor": "DTensor",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec ShardOrderEntry TensorMeta",
    "torch.distributions.bernoulli": "Bernoulli",
    "torch.distributions.beta": "Beta",
    "torch.distributions.binomial": "Binomial",
    "torch.distributions.categorical": "Categorical",
    "torch.distributions.cauchy": "Cauchy",
    "torch.distributions.chi2": "Chi2",
    "torch.distributions.constraints": (
        "Constraint MixtureSameFamilyConstraint _Boolean _Cat _CorrCholesky _Dependent "
        "_GreaterThan _GreaterThanEq _HalfOpenInterval _IndependentConstraint "
        "_IntegerGreaterThan _IntegerInterval _IntegerLessThan _Interval _LessThan "
        "_LowerCholesky _LowerTriangular _Multinomial _OneHot _PositiveDefinite "
        "_PositiveSemidefinite _Real _Simplex _Square _Stack _Symmetric"
    ),
    "torch.distributions.continuous_bernoulli": "ContinuousBernoulli",
    "torch.distributions.dirichlet": "Dirichlet",
    "torch.distributions.distribution": "Distribution",
    "torch.distributions.exp_family": "ExponentialFamily",
    "torch.distributions.exponential": "Exponential",
    "torch.distributions.fishersnedecor": "FisherSnedecor",
    "torch.distributions.gamma": "Gamma",
    "torch.distributions.generalized_pareto": "GeneralizedPareto",
    "torch.distributions.geometric": "Geometric",
    "torch.distributions.gumbel": "Gumbel",
    "torch.distributions.half_cauchy": "HalfCauchy",
    "torch.distributions.half_normal": "HalfNormal",
    "torch.distributions.independent": "Independent",
    "torch.distributions.inverse_gamma": "InverseGamma",
    "torch.distributions.kumaraswamy": "Kumaraswamy",
    "torch.distributions.laplace": "Laplace",
    "torch.distributions.lkj_cholesky": "LKJCholesky",
    "torch.distributions.log_normal": "LogNormal",
    "torch.distributions.logistic_normal": "LogisticNormal",
    "torch.distributions.lowrank_multivariate_normal": "LowRankMultivariateNormal",
    "torch.distributions.mixture_same_family": "MixtureSameFamily",
    "torch.distributions.multinomial": "Multinomial",
    "torch.distributions.multivariate_normal": "MultivariateNormal",
    "torch.distributions.negative_binomial": "NegativeBinomial",
    "torch.distributions.normal": "Normal",
    "torch.distributions.one_hot_categorical": "OneHotCategorical OneHotCategoricalStraightThrough",
    "torch.distributions.pareto": "Pareto",
    "torch.distributions.poisson": "Poisson",
    "torch.distributions.relaxed_bernoulli": "LogitRelaxedBernoulli RelaxedBernoulli",
    "torch.distributions.relaxed_categorical": "ExpRelaxedCategorical RelaxedOneHotCategorical",
    "torch.distributions.studentT": "StudentT",
    "torch.distributions.transformed_distribution": "TransformedDistribution",
    "torch.distributions.transforms": (
        "AbsTransform AffineTransform CatTransform ComposeTransform CorrCholeskyTransform "
        "CumulativeDistributionTransform ExpTransform IndependentTransform "
        "LowerCholeskyTransform PositiveDefiniteTransform PowerTransform ReshapeTransform "
        "SigmoidTransform SoftmaxTransform SoftplusTransform StackTransform "
        "StickBreakingTransform TanhTransform Transform _InverseTransform"
    ),
    "torch.distributions.uniform": "Uniform",
    "torch.distributions.von_mises": "VonMises",
    "torch.distributions.weibull": "Weibull",
    "torch.distributions.wishart": "Wishart",
    "torch.nn.modules.activation": (
        "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid "
        "LogSoftmax Mish MultiheadAttention PReLU RReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax "
        "Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink Threshold"
    ),
    "torch.nn.modules.adaptive": "AdaptiveLogSoftmaxWithLoss",
    "torch.nn.modules.batchnorm": (
        "BatchNorm1d BatchNorm2d BatchNorm3d LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d "
        "SyncBatchNorm _BatchNorm _LazyNormBase _NormBase"
    ),
    "torch.nn.modules.channelshuffle": "ChannelShuffle",
    "torch.nn.modules.container": (
        "Container ModuleDict ModuleList ParameterDict ParameterList Sequential"
    ),
    "torch.nn.modules.conv": (
        "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d LazyConv1d "
        "LazyConv2d LazyConv3d LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d "
        "_ConvNd _ConvTransposeMixin _ConvTransposeNd _LazyConvXdMixin"
    ),
    "torch.nn.modules.distance": "CosineSimilarity PairwiseDistance",
    "torch.nn.modules.dropout": (
        "AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout _DropoutNd"
    ),
    "torch.nn.modules.flatten": "Flatten Unflatten",
    "torch.nn.modules.fold": "Fold Unfold",
    "torch.nn.modules.instancenorm": (
        "InstanceNorm1d InstanceNorm2d InstanceNorm3d LazyInstanceNorm1d LazyInstanceNorm2d "
        "LazyInstanceNorm3d _InstanceNorm"
    ),
    "torch.nn.modules.linear": (
        "Bilinear Identity LazyLinear Linear NonDynamicallyQuantizableLinear"
    ),
    "torch.nn.modules.loss": (
        "BCELoss BCEWithLogitsLoss CTCLoss CosineEmbeddingLoss CrossEntropyLoss GaussianNLLLoss "
        "HingeEmbeddingLoss HuberLoss KLDivLoss L1Loss LinearCrossEntropyLoss MSELoss "
        "MarginRankingLoss MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss "
        "NLLLoss NLLLoss2d PoissonNLLLoss SmoothL1Loss SoftMarginLoss TripletMarginLoss "
        "TripletMarginWithDistanceLoss _Loss _WeightedLoss"
    ),
    "torch.nn.modules.module": "Module _WrappedHook",
    "torch.nn.modules.normalization": "CrossMapLRN2d GroupNorm LayerNorm LocalResponseNorm RMSNorm",
    "torch.nn.modules.padding": (
        "CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d "
        "ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d "
        "ReplicationPad3d ZeroPad1d ZeroPad2d ZeroPad3d _CircularPadNd _ConstantPadNd "
        "_ReflectionPadNd _ReplicationPadNd"
    ),
    "torch.nn.modules.pixelshuffle": "PixelShuffle PixelUnshuffle",
    "torch.nn.modules.pooling": (
        "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d "
        "AdaptiveMaxPool2d AdaptiveMaxPool3d AvgPool1d AvgPool2d AvgPool3d FractionalMaxPool2d "
        "FractionalMaxPool3d LPPool1d LPPool2d LPPool3d MaxPool1d MaxPool2d MaxPool3d "
        "MaxUnpool1d MaxUnpool2d MaxUnpool3d _AdaptiveAvgPoolNd _AdaptiveMaxPoolNd _AvgPoolNd "
        "_LPPoolNd _MaxPoolNd _MaxUnpoolNd"
    ),
    "torch.nn.modules.rnn": "GRU GRUCell LSTM LSTMCell RNN RNNBase RNNCell RNNCellBase",
    "torch.nn.modules.sparse": "Embedding EmbeddingBag",
    "torch.nn.modules.transformer": (
        "Transformer TransformerDecoder TransformerDecoderLayer TransformerEncoder "
        "TransformerEncoderLayer"
    ),
    "torch.nn.modules.upsampling": "Upsample UpsamplingBilinear2d UpsamplingNearest2d",
    "torch.nn.parallel.data_parallel": "DataParallel",
    "torch.nn.utils.parametrizations": "_Orthogonal _SpectralNorm _WeightNorm",
    "torch.nn.utils.parametrize": "ParametrizationList",
    "torch.nn.utils.prune": (
        "BasePruningMethod CustomFromMask Identity L1Unstructured LnStructured PruningContainer "
        "RandomStructured RandomUnstructured"
    ),
    "torch.nn.utils.rnn": "PackedSequence",
    "torch.nn.utils.spectral_norm": (
        "SpectralNorm SpectralNormLoadStateDictPreHook SpectralNormStateDictHook"
    ),
    "torch.nn.utils.weight_norm": "WeightNorm",
    "torch.optim._adafactor": "Adafactor",
    "torch.optim._muon": "Muon",
    "torch.optim.adadelta": "Adadelta",
    "torch.optim.adagrad": "Adagrad",
    "torch.optim.adam": "Adam",
    "torch.optim.adamax": "Adamax",
    "torch.optim.adamw": "AdamW",
    "torch.optim.asgd": "ASGD",
    "torch.optim.lbfgs": "LBFGS",
    "torch.optim.lr_scheduler": (
        "ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR "
        "ExponentialLR LRScheduler LambdaLR LinearLR MultiStepLR MultiplicativeLR OneCycleLR "
        "PolynomialLR ReduceLROnPlateau SequentialLR StepLR _LRScheduler"
    ),
    "torch.optim.nadam": "NAdam",
    "torch.optim.optimizer": "Optimizer _RequiredParameter",
    "torch.optim.radam": "RAdam",
    "torch.optim.rmsprop": "RMSprop",
    "torch.optim.rprop": "Rprop",
    "torch.optim.sgd": "SGD",
    "torch.optim.sparse_adam": "SparseAdam",
    "torch.optim.swa_utils": "AveragedModel SWALR",
    "torch.utils.data.dataloader": "DataLoader",
    "torch.utils.data.dataset": (
        "ChainDataset ConcatDataset Dataset IterableDataset StackDataset Subset TensorDataset"
    ),
    "torch.utils.data.distributed": "DistributedSampler",
    "torch.utils.data.sampler": (
        "BatchSampler RandomSampler Sampler SequentialSampler SubsetRandomSampler "
        "WeightedRandomSampler"
    ),
    "torch.distributed.remote_device": "_remote_device",
    "torch.distributed.tensor.placement_types": "Partial Replicate Shard _StridedShard",
    "torch.masked.maskedtensor.core": "MaskedTensor",
    "torch.nested._internal.nested_tensor": "NestedTensor",
    "torch._dynamo.decorators": "_DimRange",
    "torch.testing._internal.two_tensor": "TwoTensor",
    "torchao.dtypes.affine_quantized_tensor": "AffineQuantizedTensor",
    "torchao.dtypes.floatx.float8_layout": "Float8AQTTensorImpl Float8Layout",
    "torchao.dtypes.nf4tensor": "NF4Tensor",
    "torchao.dtypes.uintx.plain_layout": "PlainAQTTensorImpl",
    "torchao.dtypes.uintx.tensor_core_tiled_layout": (
        "TensorCoreTiledAQTTensorImpl TensorCoreTiledLayout"
    ),
    "torchao.dtypes.utils": "PlainLayout",
    "torchao.float8.config": "CastConfig Float8TypeConfig",
    "torchao.float8.inference": "Float8MMConfig",
    "torchao.quantization": (
        "Float8Tensor Int4PlainInt32Tensor Int4PreshuffledTensor Int4Tensor "
        "Int4TilePackedTo4dTensor "
        "Int8Tensor IntxOpaqueTensor IntxUnpackedToInt8Tensor"
    ),
    "torchao.quantization.granularity": "PerAxis PerBlock PerGroup PerRow PerTensor PerToken",
    "torchao.quantization.linear_activation_quantized_tensor": "LinearActivationQuantizedTensor",
    "torchao.quantization.quantize_.workflows.float8.float8_tensor": (
        "Float8Tensor QuantizeTensorToFloat8Kwargs"
    ),
    "torchao.quantization.quantize_.workflows.int8.int8_tensor": (
        "Int8Tensor QuantizeTensorToInt8Kwargs"
    ),
    "transformers.trainer_pt_utils": "AcceleratorConfig",
    "transformers.training_args": "TrainingArguments",
    "transformers.training_args_seq2seq": "Seq2SeqTrainingArguments",
    "trl.trainer.dpo_config": "DPOConfig",
    "trl.trainer.grpo_config": "GRPOConfig",
    "trl.trainer.sft_config": "SFTConfig",
}

# Classes of the list that are lists or mappings: what they hold follows as steps of their own.
_FILLED = {
    "lightning_fabric.utilities.data": "AttributeDict",
    "lightning.fabric.utilities.data": "AttributeDict",
    "pytorch_lightning.utilities.parsing": "AttributeDict",
}

# Kept as values: element types, layouts, activations, types of Python. Some classes of the list
# call methods of what is in their state: so nothing here may call or fetch what its arguments say
# (copy, getattr, sorted with a key, dataclass).
_KEPT = {
    "torch.ao.quantization.quantize": "_observer_forward_hook _observer_forward_pre_hook",
    "abc": "ABC",
    "builtins": (
        "ArithmeticError AttributeError BaseException Ellipsis Exception False IndexError KeyError "
        "None "
        "NotImplemented RuntimeError StopIteration True TypeError ValueError abs bool bytearray "
        "bytes complex "
        "dict float frozenset int len list object print range set slice str sum tuple type"
    ),
    "collections": "ChainMap Counter OrderedDict defaultdict deque",
    "fractions": "Fraction",
    "functools": "partial",
    "math": "ceil cos exp floor log log10 log2 pow sin sqrt tan tanh",
    "numbers": "Number Real Integral",
    "numpy": (
        "bool bool_ bytes_ complex128 complex64 datetime64 dtype float16 float32 float64 generic "
        "int16 "
        "int32 int64 int8 intc integer longlong matrix ndarray number object_ str_ timedelta64 "
        "uint16 "
        "uint32 uint64 uint8 void"
    ),
    "numpy.ma": "MaskedArray",
    "numpy.ma.core": "MaskedArray",
    "operator": "add and_ eq ge gt le lt mul ne neg or_ sub truediv",
    "_operator": "add and_ eq ge gt le lt mul ne neg or_ sub truediv",
    "pandas": "NA NaT",
    "pandas._libs.missing": "NA",
    "pandas._libs.tslibs.nattype": "NaT",
    "torch": (
        "abs atan bfloat16 channels_last channels_last_3d clamp contiguous_format cos dtype erf "
        "exp log "
        "int1 int2 int3 int4 int5 int6 int7 "
        "matmul mean memory_format preserve_format relu sigmoid sin softmax sqrt square sum tanh"
    ),
    "torch._C": (
        "_VariableFunctionsClass _VariableFunctionsClass.celu _VariableFunctionsClass.log_softmax "
        "_VariableFunctionsClass.relu _VariableFunctionsClass.selu _VariableFunctionsClass.sigmoid "
        "_VariableFunctionsClass.softmax _VariableFunctionsClass.tanh"
    ),
    "torch._C._nn": "elu_ gelu hardsigmoid hardswish leaky_relu log_sigmoid silu softplus",
    "torch.nn.functional": (
        "celu elu elu_ gelu glu hardshrink hardsigmoid hardswish hardtanh layer_norm leaky_relu "
        "leaky_relu_ linear log_softmax logsigmoid mish normalize prelu relu relu6 relu_ rrelu "
        "selu sigmoid "
        "silu softmax softmin softplus softshrink softsign tanh tanhshrink threshold"
    ),
    "torch.nn.init": (
        "constant_ eye_ kaiming_normal_ kaiming_uniform_ normal_ ones_ orthogonal_ trunc_normal_ "
        "uniform_ "
        "xavier_normal_ xavier_uniform_ zeros_"
    ),
    "typing": (
        "Any Callable ClassVar DefaultDict Deque Dict FrozenSet Iterable Iterator List Literal "
        "Mapping "
        "Optional OrderedDict Sequence Set Tuple Type Union"
    ),
    "zoneinfo": "ZoneInfo",
}


def _older(listed: dict[str, str]) -> dict[str, str]:
    """The names that torch.ao had before torch 1.13."""
    places = (("torch.ao.nn.", "torch.nn."), ("torch.ao.quantization", "torch.quantization"))
    found = {}
    for new, old in places:
        for module, names in listed.items():
            if module.startswith(new):
                found[module.replace(new, old, 1)] = names
    return found


# Classes of C++ whose memory is not set up before their state is: nothing may come between.
UNFINISHED = names_in({"torch.distributed.tensor.placement_types": "Partial Shard _StridedShard"})
OPTIMIZERS = names_in(
    {
        module: names
        for module, names in _LISTED.items()
        if module.startswith("torch.optim.")
        and module not in ("torch.optim.lr_scheduler", "torch.optim.swa_utils")
    }
)  # their __setstate__ calls methods of the values of their state
CLASSES = names_in(_LISTED) | names_in(_older(_LISTED))
FILLED = names_in(_FILLED)
KEPT = names_in(_KEPT) | names_in(_older(_KEPT))

# Packages that people have beside torch: of those, only what is listed is known. Never what is
# installed here: the same file has the same verdict on every machine.
_PACKAGES = (
    "_distutils_hack _pytest _yaml absl accelerate aiobotocore aiohttp aiosignal albumentations "
    "allennlp antlr4 anyio apex apport asttokens attr attrs audioread auto_gptq awq axolotl "
    "bitsandbytes blinker boto3 botocore botorch bottle bs4 captum catalyst catboost celery "
    "certifi cffi charset_normalizer chex clearml click cloudpickle colorama colossalai comet_ml "
    "compressed_tensors contourpy cryptography cupy cv2 cycler cython darts dask datasets "
    "dateutil decorator deepspeed detectron2 dgl diffusers dill distributed django dm_control "
    "docker docutils dotenv dvc e3nn econml einops espnet espnet2 evaluate execnet executing "
    "fabric fairscale fairseq fairseq2 faiss fastai fastapi fastcore fickling filelock fire flair "
    "flash_attn flask flax fontTools fsspec fvcore gdown gensim geopandas gevent git gluonts "
    "google gpytorch graphql greenlet gym gymnasium h5py haiku httpx huggingface_hub hydra "
    "hyperopt hypothesis idlelib idna ignite imageio imblearn importlib_metadata invoke iopath "
    "ipykernel IPython ipywidgets jax jedi jieba jinja2 jmespath joblib jsonpatch jsonschema "
    "jupyter keras kiwisolver kornia langchain librosa lightgbm lightning lightning_fabric "
    "lightning_utilities linear_operator litellm litgpt llvmlite loguru lxml mako markdown "
    "markdown_it markupsafe matplotlib megatron ml_dtypes mlflow mmaction mmcls mmcv mmdet "
    "mmengine mmpose mmpretrain mmseg modelscope monai more_itertools moto mpl_toolkits mpmath "
    "msgpack mujoco multidict multiprocess mypy narwhals nemo neptune networkx nltk nose numba "
    "numexpr numpyro nvidia omegaconf onnx onnxruntime open_clip openai openpyxl opt_einsum optax "
    "optimum optuna orjson packaging paddle pandas paramiko parso peft pettingzoo pexpect PIL pip "
    "pkg_resources platformdirs plotly pluggy plumbum polars prefect prompt_toolkit prophet "
    "protobuf psutil ptyprocess py py7zr pyarrow pycocotools pycparser pydantic pydantic_core "
    "pydantic_settings pydoc_data pygments pyparsing pyro pytest pytorch3d pytorch_forecasting "
    "pytorch_lightning pytorch_metric_learning pytz quanto rarfile ray redis regex requests "
    "responses rich rouge_score ruamel s3fs sacrebleu sacremoses safetensors sb3_contrib "
    "schedulefree scipy seaborn segmentation_models_pytorch sentence_transformers sentencepiece "
    "setuptools sh shap simplejson six skimage sklearn skorch smart_open sortedcontainers "
    "soundfile spacy speechbrain sqlalchemy stable_baselines3 stanza starlette statsmodels "
    "streamlit sympy tables tabulate tblib tensorboard tensorboardX tensordict tensorflow "
    "tests_runner textual thinc threadpoolctl tianshou tiktoken timm tlz tokenizers toolz "
    "torch_cluster torch_geometric torch_scatter torch_sparse torch_spline_conv torch_xla torchao "
    "torchaudio torchdata torchdiffeq torchgen torchinfo torchmetrics torchrl torchsde "
    "torchsummary torchtext torchtitan torchtune torchvision tornado tqdm traitlets "
    "transformer_engine transformers triton trl typer typing_extensions tzdata ujson ultralytics "
    "unsloth urllib3 uvicorn vector_quantize_pytorch virtualenv vllm wandb watchdog websockets "
    "werkzeug wget wheel wrapt x_transformers xarray xformers xgboost xmltodict yacs yaml yarl "
    "zict zipp zmq zstandard"
)
PACKAGES = frozenset(_PACKAGES.split())
