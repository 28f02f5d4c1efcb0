"""Does converting a trained checkpoint pay? Its conversions, fine-tuned beside the checkpoint itself, and judged."""

from residua.lab.conversions.plan import ConversionPlan as ConversionPlan
from residua.lab.conversions.plan import is_conversion as is_conversion
from residua.lab.conversions.plan import read_conversion as read_conversion
from residua.lab.conversions.run import compare_conversions as compare_conversions
