#pragma once

namespace muster::python {

/// From now on calls record which line of the user's program made them. Needs Python's lock, and torch imported.
void find_call_sites();

}  // namespace muster::python
