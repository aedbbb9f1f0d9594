// Finds the line of the user's program that makes a call: the innermost Python frame outside torch and muster.
//
// c10d releases Python's lock before a backend is called, and taking it again would cost more than the call. It is not
// needed: the frames of a thread change only as that thread runs, and it is here. What is unknown of a frame's code is
// asked once, with the lock; from then on two tables say it, and the code object is kept, so that its address stays its
// own. What a frame looks like differs between CPython's versions: those that are not known here, and those without a
// global lock, are asked by their public functions, with the lock and for some microseconds a call.
#include <Python.h>

#if PY_VERSION_HEX >= 0x030E0000 || defined(Py_GIL_DISABLED)
#define MUSTER_PUBLIC_FRAMES
#endif
#ifndef MUSTER_PUBLIC_FRAMES
#define Py_BUILD_CORE 1  // NOLINT: the name is CPython's; frames are declared where only it looks
#if PY_VERSION_HEX < 0x030B0000
#include <frameobject.h>
#else
#include <internal/pycore_frame.h>
#endif
#endif

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "call_site.h"
#include "muster/flight/call_site.h"

namespace muster::python {
namespace {

/// How far out the user's frame is looked for.
constexpr int kDeepest = 40;

#ifdef MUSTER_PUBLIC_FRAMES
using Frame = PyFrameObject;
#elif PY_VERSION_HEX >= 0x030B0000
using Frame = _PyInterpreterFrame;
#if PY_VERSION_HEX >= 0x030D0000
Frame* innermost(PyThreadState* thread) { return thread->current_frame; }
PyCodeObject* code_of(Frame* frame) {
  PyObject* code = frame->f_executable;
  return code != nullptr && PyCode_Check(code) ? reinterpret_cast<PyCodeObject*>(code) : nullptr;
}
#else
Frame* innermost(PyThreadState* thread) { return thread->cframe->current_frame; }
PyCodeObject* code_of(Frame* frame) { return frame->f_code; }
#endif
#if PY_VERSION_HEX >= 0x030C0000
/// The interpreter's own frames, where C calls Python, have no line.
bool is_real(Frame* frame) { return frame->owner != FRAME_OWNED_BY_CSTACK; }
#else
bool is_real(Frame*) { return true; }
#endif
Frame* outer(Frame* frame) { return frame->previous; }
int offset_of(Frame* frame) { return _PyInterpreterFrame_LASTI(frame) * static_cast<int>(sizeof(_Py_CODEUNIT)); }
#else
using Frame = PyFrameObject;
Frame* innermost(PyThreadState* thread) { return thread->frame; }
PyCodeObject* code_of(Frame* frame) { return frame->f_code; }
bool is_real(Frame*) { return true; }
Frame* outer(Frame* frame) { return frame->f_back; }
int offset_of(Frame* frame) { return frame->f_lasti * 2; }
#endif

/// From keys to small numbers. Entries are only added, under the State's lock, and found without it. When it is full
/// the rest stays unknown.
template <size_t kSlots>
class Table {
 public:
  static constexpr uint32_t kAbsent = ~0u;

  uint32_t find(uint64_t key) const {
    for (size_t i = 0; i < kLongestSearch; ++i) {
      const Slot& slot = slots_[(start(key) + i) % kSlots];
      const uint64_t there = slot.key.load(std::memory_order_acquire);
      if (there == key) return slot.value;
      if (there == 0) return kAbsent;
    }
    return 0;
  }
  void add(uint64_t key, uint32_t value) {
    for (size_t i = 0; i < kLongestSearch; ++i) {
      Slot& slot = slots_[(start(key) + i) % kSlots];
      if (slot.key.load(std::memory_order_relaxed) != 0) continue;
      slot.value = value;
      slot.key.store(key, std::memory_order_release);
      return;
    }
  }

 private:
  static constexpr size_t kLongestSearch = 32;
  struct Slot {
    std::atomic<uint64_t> key = 0;
    uint32_t value = 0;
  };
  static size_t start(uint64_t key) { return key * 0x9e3779b97f4a7c15 >> 40; }
  std::array<Slot, kSlots> slots_;
};

enum : uint32_t { kUnknown = 0, kUsers = 1, kOurs = 2 };

struct State {
  std::vector<std::string> ours;  ///< folders and files whose frames are not the user's
  std::mutex mutex;               ///< over what is added; Python is not called with it
  Table<4096> codes;              ///< kUsers or kOurs
  Table<8192> sites;              ///< the CallSite of a place in a code object
};

/// One for the process, like the interpreter; made before the probe is set. Never destroyed: threads may still call
/// when the program ends.
State* the_state = nullptr;

/// Python's lock, also for a thread that has it.
class Locked {
 public:
  Locked() : state_(PyGILState_Ensure()) {}
  ~Locked() { PyGILState_Release(state_); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  PyGILState_STATE state_;
};

std::string text_of(PyObject* text) {
  const char* utf8 = text != nullptr && PyUnicode_Check(text) ? PyUnicode_AsUTF8(text) : nullptr;
  if (utf8 == nullptr) PyErr_Clear();
  return utf8 != nullptr ? utf8 : "";
}

uint32_t learn_code(PyCodeObject* code) {
  const Locked lock;
  State& all = *the_state;
  const auto key = reinterpret_cast<uint64_t>(code);
  const std::string file = text_of(code->co_filename);
  bool ours = file.starts_with("<frozen");
  for (const std::string& prefix : all.ours) ours = ours || file.starts_with(prefix);
  const std::lock_guard adding(all.mutex);
  if (const uint32_t known = all.codes.find(key); known != Table<1>::kAbsent) return known;
  Py_INCREF(code);
  all.codes.add(key, ours ? kOurs : kUsers);
  return ours ? kOurs : kUsers;
}

/// "train.py:71": below the current folder without its name, elsewhere in full.
CallSite learn_site(PyCodeObject* code, int offset, uint64_t key) {
  const Locked lock;
  State& all = *the_state;
  std::string file = text_of(code->co_filename);
  char folder[4096];
  if (getcwd(folder, sizeof(folder)) != nullptr) {
    const std::string prefix = std::string(folder) + "/";
    if (file.starts_with(prefix)) file.erase(0, prefix.size());
  }
  const CallSite site = intern_call_site(file + ":" + std::to_string(PyCode_Addr2Line(code, offset)));
  const std::lock_guard adding(all.mutex);
  if (all.sites.find(key) == Table<1>::kAbsent) all.sites.add(key, site);
  return site;
}

uint32_t owner_of(PyCodeObject* code) {
  const uint32_t whose = the_state->codes.find(reinterpret_cast<uint64_t>(code));
  return whose != Table<1>::kAbsent ? whose : learn_code(code);
}

CallSite site_of(PyCodeObject* code, int offset) {
  // Addresses have 48 bits; the offsets of a very long function may share an entry.
  const uint64_t key = reinterpret_cast<uint64_t>(code) << 16 | (static_cast<uint64_t>(offset) & 0xffff);
  const uint32_t site = the_state->sites.find(key);
  return site != Table<1>::kAbsent ? site : learn_site(code, offset, key);
}

#ifdef MUSTER_PUBLIC_FRAMES

CallSite find_call_site() {
  if (PyGILState_GetThisThreadState() == nullptr) return 0;  // not Python's thread: it has no frames
  const Locked lock;
  CallSite site = 0;
  Frame* frame = PyThreadState_GetFrame(PyThreadState_Get());
  for (int depth = 0; frame != nullptr && depth < kDeepest; ++depth) {
    PyCodeObject* const code = PyFrame_GetCode(frame);
    const uint32_t whose = owner_of(code);
    if (whose == kUsers) site = site_of(code, PyFrame_GetLasti(frame));
    Py_DECREF(code);
    Frame* const outer = whose == kOurs ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  return site;
}

#else

CallSite find_call_site() {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (thread == nullptr) return 0;
  Frame* frame = innermost(thread);
  for (int depth = 0; frame != nullptr && depth < kDeepest; ++depth, frame = outer(frame)) {
    PyCodeObject* code = is_real(frame) ? code_of(frame) : nullptr;
    if (code == nullptr) continue;
    const uint32_t whose = owner_of(code);
    if (whose == kUnknown) return 0;
    if (whose == kUsers) return site_of(code, offset_of(frame));
  }
  return 0;
}

#endif

/// The folder of a package, or the file of a module, that is imported already.
void add_module(const char* module_name) {
  PyObject* modules = PyImport_GetModuleDict();  // borrowed, as what comes out of it
  PyObject* module = PyDict_GetItemString(modules, module_name);
  PyObject* file = module != nullptr ? PyObject_GetAttrString(module, "__file__") : nullptr;
  std::string path = text_of(file);
  Py_XDECREF(file);
  PyErr_Clear();
  constexpr std::string_view kPackage = "/__init__.py";
  if (path.ends_with(kPackage)) path.erase(path.size() - kPackage.size() + 1);
  if (!path.empty()) the_state->ours.push_back(path);
}

}  // namespace

void find_call_sites() {
  if (the_state != nullptr) return;
  the_state = new State;
  // The last is between torch and the user wherever a context manager ends.
  for (const char* module : {"torch", "muster", "contextlib"}) add_module(module);
  set_call_site_probe(find_call_site);
}

}  // namespace muster::python
