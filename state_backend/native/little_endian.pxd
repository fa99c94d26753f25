"""Numbers in the byte order of the machine, which is little-endian, at any address."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy


cdef inline uint16_t u16(const uint8_t* at) noexcept nogil:
    cdef uint16_t found
    memcpy(&found, at, 2)
    return found


cdef inline uint32_t u32(const uint8_t* at) noexcept nogil:
    cdef uint32_t found
    memcpy(&found, at, 4)
    return found


cdef inline uint64_t u64(const uint8_t* at) noexcept nogil:
    cdef uint64_t found
    memcpy(&found, at, 8)
    return found


cdef inline double f64(const uint8_t* at) noexcept nogil:
    cdef double found
    memcpy(&found, at, 8)
    return found
