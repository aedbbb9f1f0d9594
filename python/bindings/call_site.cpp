// Finds the line of the user's program that makes a call: the innermost Python frame outside torch and muster.
//
// c10d releases the GIL before it calls a backend, and taking it again would cost more than the call. The GIL is not
// needed here: a thread's frames change only while that thread runs, and this code runs on that thread.
//
// A code object that is not known yet is inspected once, with the GIL. After that, two tables hold the result. The code
// object is kept alive, so that no other object can get its address.
//
// The layout of a frame depends on the version of CPython. Versions that are not known here, and versions without a
// GIL, are read through CPython's public functions. These need the GIL and cost some microseconds per call.
#include <Python.h>

#if PY_VERSION_HEX >= 0x030E0000 || defined(Py_GIL_DISABLED)
#define MUSTER_PUBLIC_FRAMES
#endif
#ifndef MUSTER_PUBLIC_FRAMES
#define Py_BUILD_CORE 1  // NOLINT: CPython's name; its headers declare frames only with it
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

/// How many frames are searched for the user's frame.
constexpr int kMaxDepth = 40;

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

/// A lock-free map from keys (never 0) to small numbers, with linear probing over kMaxProbes slots. If these slots
/// are full, add() drops the entry, and find() returns 0, which means unknown.
///
/// Writers hold State::mutex; readers hold no lock. Entries are only added, never changed or removed.
///   key    0: the slot is free. add() stores it last, with release. find() loads it with acquire, so a reader that
///          sees the key also sees the value. The load in add() may be relaxed, because only its caller writes.
///   value  written once, before the key is stored.
template <size_t kSlots>
class Table {
 public:
  static constexpr uint32_t kAbsent = ~0u;

  uint32_t find(uint64_t key) const {
    for (size_t i = 0; i < kMaxProbes; ++i) {
      const Slot& slot = slots_[(start(key) + i) % kSlots];
      const uint64_t there = slot.key.load(std::memory_order_acquire);
      if (there == key) return slot.value;
      if (there == 0) return kAbsent;
    }
    return 0;
  }
  void add(uint64_t key, uint32_t value) {
    for (size_t i = 0; i < kMaxProbes; ++i) {
      Slot& slot = slots_[(start(key) + i) % kSlots];
      if (slot.key.load(std::memory_order_relaxed) != 0) continue;
      slot.value = value;
      slot.key.store(key, std::memory_order_release);
      return;
    }
  }

 private:
  static constexpr size_t kMaxProbes = 32;
  struct Slot {
    std::atomic<uint64_t> key = 0;
    uint32_t value = 0;
  };
  static size_t start(uint64_t key) { return key * 0x9e3779b97f4a7c15 >> 40; }
  std::array<Slot, kSlots> slots_;
};

enum : uint32_t { kUnknown = 0, kUsers = 1, kOurs = 2 };

struct State {
  std::vector<std::string> ours;  ///< directories and files whose frames are not the user's
  std::mutex mutex;               ///< held while an entry is added; no Python code is called while it is held
  Table<4096> codes;              ///< kUsers or kOurs
  Table<8192> sites;              ///< the CallSite of an instruction in a code object
};

/// One object per process, like the interpreter. It is created before the probe is set, and never destroyed, because
/// threads may still make calls when the program ends.
State* the_state = nullptr;

/// Takes the GIL, also on a thread that has it already.
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

/// Returns "train.py:71". The path is relative for files below the current directory, and as Python reports it for
/// others.
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
  // Addresses have 48 bits. In a very long function, two offsets may share an entry.
  const uint64_t key = reinterpret_cast<uint64_t>(code) << 16 | (static_cast<uint64_t>(offset) & 0xffff);
  const uint32_t site = the_state->sites.find(key);
  return site != Table<1>::kAbsent ? site : learn_site(code, offset, key);
}

#ifdef MUSTER_PUBLIC_FRAMES

CallSite find_call_site() {
  if (PyGILState_GetThisThreadState() == nullptr) return 0;  // a thread that Python does not know has no frames
  const Locked lock;
  CallSite site = 0;
  Frame* frame = PyThreadState_GetFrame(PyThreadState_Get());
  for (int depth = 0; frame != nullptr && depth < kMaxDepth; ++depth) {
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
  for (int depth = 0; frame != nullptr && depth < kMaxDepth; ++depth, frame = outer(frame)) {
    PyCodeObject* code = is_real(frame) ? code_of(frame) : nullptr;
    if (code == nullptr) continue;
    const uint32_t whose = owner_of(code);
    if (whose == kUnknown) return 0;
    if (whose == kUsers) return site_of(code, offset_of(frame));
  }
  return 0;
}

#endif

/// Adds the directory of a package, or the file of a module, that is already imported.
void add_module(const char* module_name) {
  PyObject* modules = PyImport_GetModuleDict();  // borrowed, like its items
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
  // contextlib is between torch and the user where a context manager ends.
  for (const char* module : {"torch", "muster", "contextlib"}) add_module(module);
  set_call_site_probe(find_call_site);
}

}  // namespace muster::python
