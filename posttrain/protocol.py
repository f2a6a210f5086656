"""Front door to `DataProto`, the batch that flows between the stages; it is defined in `posttrain.batch`."""

from posttrain.batch.data_proto import DataProto, DataProtoItem
from posttrain.batch.fields import ObjectBatch, TensorBatch, pad_to_common_width

__all__ = ["DataProto", "DataProtoItem", "ObjectBatch", "TensorBatch", "pad_to_common_width"]
