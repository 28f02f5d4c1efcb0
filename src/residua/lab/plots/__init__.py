"""draw(figures, out): every plot as PNG and SVG, from the data of `residua.lab.figures` and nothing else.

The same data give the same bytes. One colour and line for a series in every plot: black for what the others are
compared with, then the Okabe-Ito colours, which readers with any colour vision can tell apart, then the same dashed.

    curves-tokens, curves-time   validation loss, the whole run and the end of it, with the band of the seeds
    routing, routing-<slug>      mean weight, site x source: all designs on one page, and one page each
    depth-weights                largest weight and normalised entropy of the reads, over depth
    stream-rms                   RMS of what the sites read and of what the sublayers add, over depth
    quality-speed                bits per byte against speed and memory over the baseline's, from two series on
"""

from residua.lab.plots.save import draw as draw
from residua.lab.plots.style import OKABE_ITO as OKABE_ITO
from residua.lab.plots.style import Style as Style
from residua.lab.plots.style import styles as styles
