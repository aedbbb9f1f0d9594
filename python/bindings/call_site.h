#pragma once

namespace muster::python {

/// From now on, calls record the line of the user's program that made them. Needs the GIL. torch must be imported.
void find_call_sites();

}  // namespace muster::python
