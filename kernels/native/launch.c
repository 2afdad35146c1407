// Launches of compiled kernels, and what tensors have in common, at little cost to the host.
//
// A `Launch` holds all that launches of one plan share: the parameters of the kernel as bytes, where tensors and numbers of a
// call go in them, and the launch's attributes.  A call writes addresses and numbers, encodes a tensor map anew where its
// tensor has moved, and starts the kernel on PyTorch's current stream.  Whatever it cannot do, or must not (hooks of Triton are
// set, a tensor that the device cannot read), it hands to `slow`, which is Triton's own launch and raises Triton's own errors.
//
// Threads: parameters of a call stand on its stack.  What a plan remembers is read and written with the GIL held.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cuda.h"

#ifdef Py_GIL_DISABLED
#error "the memory of a plan counts on the GIL"
#endif

// --- the driver ------------------------------------------------------------------------------------------------------

typedef CUresult (*launch_t)(const CUlaunchConfig *, CUfunction, void **, void **);
typedef CUresult (*encode_t)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                             const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
typedef CUresult (*attribute_t)(void *, CUpointer_attribute, CUdeviceptr);
typedef CUresult (*get_context_t)(CUcontext *);
typedef CUresult (*set_context_t)(CUcontext);
typedef CUresult (*retain_t)(CUcontext *, CUdevice);
typedef CUresult (*get_device_t)(CUdevice *, int);
typedef CUresult (*version_t)(int *);
typedef CUresult (*words_t)(CUresult, const char **);

static struct {
  launch_t launch;
  encode_t encode;
  attribute_t attribute;
  get_context_t get_context;
  set_context_t set_context;
  retain_t retain;
  get_device_t get_device;
  words_t words;
  int version;
} driver;

// The driver's functions, looked up once; false with an exception where there is no driver.
static bool have_driver(void) {
  if (driver.launch) return true;
  void *library = dlopen("libcuda.so.1", RTLD_LAZY);
  if (!library) {
    PyErr_SetString(PyExc_OSError, "libcuda.so.1 cannot be opened");
    return false;
  }
  version_t version = (version_t)dlsym(library, "cuDriverGetVersion");
  driver.encode = (encode_t)dlsym(library, "cuTensorMapEncodeTiled");
  driver.attribute = (attribute_t)dlsym(library, "cuPointerGetAttribute");
  driver.get_context = (get_context_t)dlsym(library, "cuCtxGetCurrent");
  driver.set_context = (set_context_t)dlsym(library, "cuCtxSetCurrent");
  driver.retain = (retain_t)dlsym(library, "cuDevicePrimaryCtxRetain");
  driver.get_device = (get_device_t)dlsym(library, "cuDeviceGet");
  driver.words = (words_t)dlsym(library, "cuGetErrorString");
  launch_t launch = (launch_t)dlsym(library, "cuLaunchKernelEx");
  if (!launch || !version || !driver.encode || !driver.attribute || !driver.get_context || !driver.set_context ||
      !driver.retain || !driver.get_device || !driver.words || version(&driver.version) != CUDA_SUCCESS) {
    PyErr_SetString(PyExc_OSError, "libcuda.so.1 lacks a function");
    return false;
  }
  driver.launch = launch;
  return true;
}

// --- tensors ---------------------------------------------------------------------------------------------------------
// The layout of https://github.com/dmlc/dlpack, version 1: PyTorch 2.10 and later give it without a Python call.

typedef struct {
  void *data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} Seen;

typedef struct {
  uint32_t major, minor;
  void *previous;
  void *allocate, *from_object, *to_object;
  int (*see)(void *, Seen *);
  void *stream;
} Exchange;

static PyTypeObject *tensor_type;  // torch.Tensor
static int (*see)(void *, Seen *);
static PyObject *str_data_ptr, *str_requires_grad, *str_calls;

// Where a tensor begins; false with an exception for what is none.
static inline bool address_of(PyObject *tensor, uint64_t *address) {
  if (see && Py_TYPE(tensor) == tensor_type) {
    Seen seen;
    if (see(tensor, &seen) == 0) {
      *address = (uint64_t)(uintptr_t)seen.data + seen.byte_offset;
      return true;
    }
    PyErr_Clear();
  }
  PyObject *number = PyObject_CallMethodNoArgs(tensor, str_data_ptr);
  if (!number) return false;
  *address = PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  return !(*address == (uint64_t)-1 && PyErr_Occurred());
}

#define MOST_RANK 8
#define MOST_WORDS 512

// facts(tensors, gradients) -> bytes | None: all that a plan depends on of tensors, a tuple of plain ones and None: types,
// devices, shapes, strides, whether they begin at 16 bytes, and whether the second and the third begin at one place.  None where
// one is anything else, or with `gradients` requires a gradient.
static PyObject *facts(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
  if (nargs != 2 || !PyTuple_CheckExact(args[0])) {
    PyErr_SetString(PyExc_TypeError, "facts: expected a tuple of tensors and whether gradients are on");
    return NULL;
  }
  int gradients = PyObject_IsTrue(args[1]);
  if (gradients < 0) return NULL;
  if (!see) Py_RETURN_NONE;
  int64_t words[MOST_WORDS];
  int at = 0;
  void *begins[3] = {NULL, NULL, NULL};
  Py_ssize_t count = PyTuple_GET_SIZE(args[0]);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *tensor = PyTuple_GET_ITEM(args[0], i);
    if (at + 4 + 2 * MOST_RANK > MOST_WORDS) Py_RETURN_NONE;
    if (tensor == Py_None) {
      words[at++] = -1;
      continue;
    }
    Seen seen;
    if (Py_TYPE(tensor) != tensor_type) Py_RETURN_NONE;
    if (see(tensor, &seen) != 0) {
      PyErr_Clear();
      Py_RETURN_NONE;
    }
    if (seen.ndim > MOST_RANK || seen.byte_offset) Py_RETURN_NONE;
    if (gradients) {
      PyObject *wanted = PyObject_GetAttr(tensor, str_requires_grad);
      if (!wanted) return NULL;
      bool plain = wanted == Py_False;
      Py_DECREF(wanted);
      if (!plain) Py_RETURN_NONE;
    }
    if (i < 3) begins[i] = seen.data;
    words[at++] = seen.ndim | (int64_t)seen.code << 8 | (int64_t)seen.bits << 16 | (int64_t)seen.lanes << 24 |
                  (int64_t)((uintptr_t)seen.data & 15) << 40;
    words[at++] = (int64_t)seen.device_type << 32 | (uint32_t)seen.device_id;
    for (int n = 0; n < seen.ndim; ++n) words[at++] = seen.shape[n];
    for (int n = 0; n < seen.ndim; ++n) words[at++] = seen.strides[n];
  }
  words[at++] = (gradients ? 2 : 0) | (begins[1] == begins[2] ? 1 : 0);
  return PyBytes_FromStringAndSize((const char *)words, at * (Py_ssize_t)sizeof(int64_t));
}

// --- launches --------------------------------------------------------------------------------------------------------

typedef enum { POINTER, MAP, F32, F64, I32, I64 } Kind;

typedef struct {
  CUtensorMap map;  // of the tensor at `address`
  int type, rank, swizzle, fill;
  bool small;  // Triton mends maps of small tensors from 3.7 on, for drivers up to 13.1
  cuuint64_t shape[5], strides[5];
  cuuint32_t box[5];
} Map;

typedef struct {
  Kind kind;
  int given, offset;  // which argument of a call, and where it goes in the parameters
  uint64_t address;   // of the last call; 0: none
  uint64_t seen_as;   // what the device reads it as
  Map *map;
} Slot;

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *slow;              // (arguments of a call) -> None: Triton's own launch
  PyObject *hooks;             // what has the two attributes below
  PyObject *enter, *leave;     // their names
  PyObject *stream_of, *index; // of PyTorch; the device
  CUfunction function;
  CUlaunchConfig config;
  CUlaunchAttribute attributes[4];
  int device, slots, params, size, given;
  Slot *slot;
  int *offset;  // of each parameter
  char *block;  // parameters that no call changes, zeros for the others
} Launch;

// Whether no hook hangs on Triton's launches under a name: None, or a chain without calls.
static inline bool unhooked(PyObject *hooks, PyObject *name) {
  PyObject *hook = PyObject_GetAttr(hooks, name);
  bool none = hook == Py_None;
  if (hook && !none) {
    PyObject *calls = PyObject_GetAttr(hook, str_calls);
    none = calls && PyList_CheckExact(calls) && PyList_GET_SIZE(calls) == 0;
    Py_XDECREF(calls);
  }
  Py_XDECREF(hook);
  if (!none) PyErr_Clear();
  return none;
}

// As Triton: a thread without a context gets the device's.
static inline bool have_context(int index) {
  CUcontext context = NULL;
  if (driver.get_context(&context) != CUDA_SUCCESS) return false;
  if (context) return true;
  CUdevice device;
  return driver.get_device(&device, index) == CUDA_SUCCESS && driver.retain(&context, device) == CUDA_SUCCESS &&
         driver.set_context(context) == CUDA_SUCCESS;
}

static bool encode(Map *map, uint64_t address) {
  static const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  if (driver.encode(&map->map, map->type, map->rank, (void *)(uintptr_t)address, map->shape, map->strides, map->box, steps,
                    CU_TENSOR_MAP_INTERLEAVE_NONE, map->swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                    map->fill) != CUDA_SUCCESS)
    return false;
  if (map->small) ((uint64_t *)&map->map)[1] &= ~(1llu << 21);
  return true;
}

// Write what a call gives into its parameters; false, perhaps with an exception, for what only `slow` can judge.
static inline bool write_slots(Launch *self, PyObject *const *args, char *block) {
  for (int i = 0; i < self->slots; ++i) {
    Slot *slot = self->slot + i;
    PyObject *given = args[slot->given];
    char *to = block + slot->offset;
    if (slot->kind == POINTER || slot->kind == MAP) {
      uint64_t address;
      if (!address_of(given, &address)) return false;
      if (address != slot->address || !address) {
        if (slot->kind == MAP) {
          slot->address = 0;  // the map is in between
          if (!encode(slot->map, address)) return false;
        } else if (address) {
          uint64_t seen_as = 0;
          if (driver.attribute(&seen_as, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, address) != CUDA_SUCCESS) return false;
          slot->seen_as = seen_as;
        } else {
          slot->seen_as = 0;
        }
        slot->address = address;
      }
      if (slot->kind == MAP)
        memcpy(to, &slot->map->map, sizeof(CUtensorMap));
      else
        memcpy(to, &slot->seen_as, 8);
    } else if (slot->kind == F32 || slot->kind == F64) {
      double number = PyFloat_AsDouble(given);
      if (number == -1.0 && PyErr_Occurred()) return false;
      float narrow = (float)number;
      if (slot->kind == F32)
        memcpy(to, &narrow, 4);
      else
        memcpy(to, &number, 8);
    } else {
      long long number = PyLong_AsLongLong(given);
      if (number == -1 && PyErr_Occurred()) return false;
      int32_t narrow = (int32_t)number;
      if (slot->kind == I64) {
        memcpy(to, &number, 8);
      } else {
        if (narrow != number) return false;
        memcpy(to, &narrow, 4);
      }
    }
  }
  return true;
}

static PyObject *start(PyObject *object, PyObject *const *args, size_t flags, PyObject *names) {
  Launch *self = (Launch *)object;
  Py_ssize_t nargs = PyVectorcall_NARGS(flags);
  if (nargs != self->given || names) {
    PyErr_Format(PyExc_TypeError, "launch: expected %d arguments, got %zd", self->given, nargs);
    return NULL;
  }
  // Aligned as tensor maps are.
  char *block = (char *)(((uintptr_t)__builtin_alloca(self->size + 127) + 127) & ~(uintptr_t)127);
  void **params = __builtin_alloca(sizeof(void *) * self->params);
  memcpy(block, self->block, self->size);
  if (!unhooked(self->hooks, self->enter) || !unhooked(self->hooks, self->leave) || !have_context(self->device) ||
      !write_slots(self, args, block)) {
    PyErr_Clear();
    return PyObject_Vectorcall(self->slow, args, nargs, NULL);
  }
  for (int i = 0; i < self->params; ++i) params[i] = block + self->offset[i];
  PyObject *stream = PyObject_CallOneArg(self->stream_of, self->index);
  if (!stream) return NULL;
  CUlaunchConfig config = self->config;
  config.attrs = self->attributes;
  config.hStream = (CUstream)(uintptr_t)PyLong_AsUnsignedLongLong(stream);
  Py_DECREF(stream);
  if (PyErr_Occurred()) return NULL;
  CUresult result;
  // A launch waits where the device's queue is full, and what it waits for may need the GIL.
  Py_BEGIN_ALLOW_THREADS;
  result = driver.launch(&config, self->function, params, NULL);
  Py_END_ALLOW_THREADS;
  if (result != CUDA_SUCCESS) {
    const char *words = NULL;
    driver.words(result, &words);
    PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s", words ? words : "unknown error");
    return NULL;
  }
  Py_RETURN_NONE;
}

static int read_numbers(PyObject *numbers, uint64_t *to, int most) {
  if (!PyTuple_Check(numbers) || PyTuple_GET_SIZE(numbers) > most) {
    PyErr_SetString(PyExc_TypeError, "launch: expected a tuple of a few whole numbers");
    return -1;
  }
  int count = (int)PyTuple_GET_SIZE(numbers);
  for (int i = 0; i < count; ++i) {
    to[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(numbers, i));
    if (PyErr_Occurred()) return -1;
  }
  return count;
}

// (kind, given, offset) or (MAP, given, offset, type, swizzle, fill, mended, shape, strides in bytes, box), innermost first.
static bool read_slot(PyObject *said, Slot *slot, int given, int size) {
  static const int sizes[] = {8, sizeof(CUtensorMap), 4, 8, 4, 8};
  int kind, mended = 0, type, swizzle, fill;
  PyObject *shape, *strides, *box;
  if (!PyArg_ParseTuple(said, "iii|iiipOOO", &kind, &slot->given, &slot->offset, &type, &swizzle, &fill, &mended, &shape,
                        &strides, &box))
    return false;
  if (kind < POINTER || kind > I64 || slot->given < 0 || slot->given >= given || slot->offset < 0 ||
      slot->offset + sizes[kind] > size) {
    PyErr_SetString(PyExc_ValueError, "launch: a slot outside the call or the parameters");
    return false;
  }
  slot->kind = kind;
  if (kind != MAP) return true;
  // A tensor map is aligned to 64 bytes or 128, memory of Python to 16.
  Map *map = NULL;
  if (PyTuple_GET_SIZE(said) != 10 || posix_memalign((void **)&map, 128, sizeof(Map))) {
    PyErr_SetString(PyExc_ValueError, "launch: a tensor map without its shape");
    return false;
  }
  memset(map, 0, sizeof(Map));
  slot->map = map;
  map->type = type, map->swizzle = swizzle, map->fill = fill;
  uint64_t boxes[5];
  int rank = read_numbers(shape, (uint64_t *)map->shape, 5);
  if (rank < 1 || read_numbers(strides, (uint64_t *)map->strides, 5) != rank || read_numbers(box, boxes, 5) != rank) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "launch: a tensor map of several ranks");
    return false;
  }
  map->rank = rank;
  // The first stride is an element's bytes, which the driver knows by the type.
  uint64_t element = map->strides[0];
  uint32_t last = 0;  // in 32 bits, as Triton counts
  for (int i = 0; i < rank; ++i) {
    map->box[i] = (cuuint32_t)boxes[i];
    last += (uint32_t)((map->shape[i] - 1) * (i ? map->strides[i] : element));
  }
  for (int i = 0; i + 1 < rank; ++i) map->strides[i] = map->strides[i + 1];
  map->strides[rank - 1] = map->shape[rank - 1] * (rank == 1 ? element : map->strides[rank - 2]);
  map->small = mended && driver.version <= 13010 && (int32_t)(last + 1) < 128 * 1024;
  return true;
}

static void set_attributes(Launch *self, int clusters, int cooperative, int overlaps) {
  int n = 0;
  if (overlaps) {
    self->attributes[n].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    self->attributes[n++].value.programmaticStreamSerializationAllowed = 1;
  }
  if (cooperative) {
    self->attributes[n].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    self->attributes[n++].value.cooperative = 1;
  }
  if (clusters != 1) {
    self->attributes[n].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    self->attributes[n].value.clusterDim.x = clusters;
    self->attributes[n].value.clusterDim.y = 1;
    self->attributes[n++].value.clusterDim.z = 1;
    self->attributes[n].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE;
    self->attributes[n++].value.clusterSchedulingPolicyPreference = CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
  }
  self->config.numAttrs = n;
}

static int launch_init(PyObject *object, PyObject *args, PyObject *names) {
  Launch *self = (Launch *)object;
  unsigned long long function;
  int warps, clusters, shared, cooperative, overlaps;
  PyObject *offsets, *slots;
  const char *block;
  Py_ssize_t size;
  if (self->slow) {
    PyErr_SetString(PyExc_TypeError, "launch: made once");
    return -1;
  }
  if (!have_driver() ||
      !PyArg_ParseTuple(args, "KiO(III)iiippy#O!O!iOOUUO", &function, &self->device, &self->index, &self->config.gridDimX,
                        &self->config.gridDimY, &self->config.gridDimZ, &warps, &clusters, &shared, &cooperative, &overlaps,
                        &block, &size, &PyTuple_Type, &offsets, &PyTuple_Type, &slots, &self->given, &self->slow,
                        &self->hooks, &self->enter, &self->leave, &self->stream_of)) {
    // Borrowed until here.
    self->index = self->slow = self->hooks = self->enter = self->leave = self->stream_of = NULL;
    return -1;
  }
  Py_INCREF(self->index), Py_INCREF(self->slow), Py_INCREF(self->hooks), Py_INCREF(self->enter), Py_INCREF(self->leave);
  Py_INCREF(self->stream_of);
  self->function = (CUfunction)(uintptr_t)function;
  self->config.gridDimX *= clusters;
  self->config.blockDimX = 32 * warps;
  self->config.blockDimY = self->config.blockDimZ = 1;
  self->config.sharedMemBytes = shared;
  set_attributes(self, clusters, cooperative, overlaps);
  self->size = (int)size;
  self->params = (int)PyTuple_GET_SIZE(offsets);
  int count = (int)PyTuple_GET_SIZE(slots);
  self->block = PyMem_Malloc(size + 1);
  self->offset = PyMem_Calloc(self->params + 1, sizeof(int));
  self->slot = PyMem_Calloc(count + 1, sizeof(Slot));
  if (!self->block || !self->offset || !self->slot) {
    PyErr_NoMemory();
    return -1;
  }
  memcpy(self->block, block, size);
  for (int i = 0; i < self->params; ++i) {
    self->offset[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(offsets, i));
    if (PyErr_Occurred()) return -1;
  }
  for (self->slots = 0; self->slots < count; ++self->slots)
    if (!read_slot(PyTuple_GET_ITEM(slots, self->slots), self->slot + self->slots, self->given, self->size)) return -1;
  self->vectorcall = start;
  return 0;
}

static int launch_traverse(PyObject *object, visitproc visit, void *arg) {
  Launch *self = (Launch *)object;
  Py_VISIT(self->slow);
  Py_VISIT(self->hooks);
  Py_VISIT(self->stream_of);
  return 0;
}

static int launch_clear(PyObject *object) {
  Launch *self = (Launch *)object;
  Py_CLEAR(self->slow);
  Py_CLEAR(self->hooks);
  Py_CLEAR(self->stream_of);
  return 0;
}

static void launch_dealloc(PyObject *object) {
  Launch *self = (Launch *)object;
  PyObject_GC_UnTrack(object);
  launch_clear(object);
  Py_CLEAR(self->index);
  Py_CLEAR(self->enter);
  Py_CLEAR(self->leave);
  // The slot that failed to be read is one behind the last and may have a map.
  if (self->slot)
    for (int i = 0; i <= self->slots; ++i) free(self->slot[i].map);
  PyMem_Free(self->slot);
  PyMem_Free(self->offset);
  PyMem_Free(self->block);
  Py_TYPE(object)->tp_free(object);
}

static PyObject *refuse(PyObject *object, PyObject *const *args, size_t flags, PyObject *names) {
  PyErr_SetString(PyExc_TypeError, "launch: not made");
  return NULL;
}

static PyObject *launch_new(PyTypeObject *type, PyObject *args, PyObject *names) {
  Launch *self = (Launch *)type->tp_alloc(type, 0);
  if (self) self->vectorcall = refuse;
  return (PyObject *)self;
}

static PyTypeObject launch_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "tilecast_launch.Launch",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "A launch of a compiled kernel on its grid, called with the tensors and numbers of a call.",
    .tp_new = launch_new,
    .tp_init = launch_init,
    .tp_dealloc = launch_dealloc,
    .tp_traverse = launch_traverse,
    .tp_clear = launch_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Launch, vectorcall),
};

// know(torch.Tensor, capsule | None): the type of plain tensors, and PyTorch's way to look at them from C.
static PyObject *know(PyObject *self, PyObject *args) {
  PyObject *type, *capsule;
  if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &type, &capsule)) return NULL;
  Py_INCREF(type);
  Py_XSETREF(tensor_type, (PyTypeObject *)type);
  see = NULL;
  if (capsule != Py_None) {
    const Exchange *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!table) return NULL;
    if (table->major == 1) see = table->see;
  }
  return PyBool_FromLong(see != NULL);
}

static PyMethodDef methods[] = {
    {"facts", (PyCFunction)(void (*)(void))facts, METH_FASTCALL, "What a plan depends on of tensors."},
    {"know", know, METH_VARARGS, "How to look at tensors."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "tilecast_launch", NULL, -1, methods};

PyMODINIT_FUNC PyInit_tilecast_launch(void) {
  str_data_ptr = PyUnicode_InternFromString("data_ptr");
  str_requires_grad = PyUnicode_InternFromString("requires_grad");
  str_calls = PyUnicode_InternFromString("calls");
  if (!str_data_ptr || !str_requires_grad || !str_calls || PyType_Ready(&launch_type) < 0) return NULL;
  PyObject *module = PyModule_Create(&module_def);
  if (!module) return NULL;
  Py_INCREF(&launch_type);
  if (PyModule_AddObject(module, "Launch", (PyObject *)&launch_type) < 0) {
    Py_DECREF(&launch_type);
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
